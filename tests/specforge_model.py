"""SpecForge's draft class around the weights of a loaded draft; bench/draft_forward.py times it too."""

from __future__ import annotations

import torch

from bench._peers import fill, llama_config
from lib.checkpoints import Draft


def specforge_model(draft: Draft):
    """The draft in SpecForge's `LlamaForCausalLMEagle3`, which knows no `norm_before_residual`.

    Its norms are compiled at first use: a C++ compiler is needed.
    """
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    with torch.device("meta"):
        model = LlamaForCausalLMEagle3(llama_config(draft, draft_vocab_size=draft.draft_vocab))
    model.midlayer.self_attn._init_rope()  # its tables are no weights
    return fill(model, draft, "midlayer")
