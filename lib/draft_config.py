"""What a draft's `config.json` declares: sizes, flags, taps and rotary settings, each with its source.

Knows both shapes of config: speculators' (the layer nested under `transformer_layer_config`) and the
flat one of everybody else, with EAGLE-3's own keys at the top or under `eagle_config`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lib.contract import Contract, Rope, Source
from lib.errors import CheckpointError, ContractError
from lib.taps import CONVENTIONS, Normed, Tap, default_triple, hypotheses, taps_from_ids
from lib.weights import read_json

IDS = "eagle_aux_hidden_state_layer_ids"
# Keys that ask for a forward we do not have: value that is fine, and what another one means.
UNEXPRESSED = (
    ("use_mtp_layernorm", False, "norms of both inputs first (Model-Optimizer megatron_eagle.py)"),
    ("next_layer_regular", True, "token embeddings into every layer (Model-Optimizer, TensorRT-LLM)"),
    ("parallel_draft_step", 1, "Medusa heads on an EAGLE draft (Model-Optimizer)"),
    ("parallel_drafting", False, "P-EAGLE, which drafts all tokens in one pass"),
    ("speculators_model_type", "eagle3", "another kind of speculator"),
    ("hidden_act", "silu", "another activation in the MLP"),
    ("mla_use_nope", False, "latent attention without rotary (TorchSpec kimi_k3_eagle3_mla.json)"),
)
# Rotary parameters by kind, as transformers' `modeling_rope_utils.py` reads them.
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_POSITIVE = {name for names in ROPE_NEEDS.values() for name in names} | {"attention_factor"}
ROPE_NUMBERS = ROPE_POSITIVE | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
ROPE_FLAGS = {"truncate"}


class DraftConfig:
    """`config.json` of a draft, asked field by field; every default taken goes into `notes`.

    Args:
        path: the draft's folder.
        n_layers: of the target, or None if it is not at hand.
        convention: whose reading of the tap ids to declare, a key of `taps.CONVENTIONS`.

    Attributes:
        formats: what the draft could be (`draft_formats.recognise`); set by the loader.
        use_fc: False for drafts on the target's final state alone (`use_aux_hidden_state: false`).
        last_norm: False for drafts whose lm_head sees the last layer's output as it is.
    """

    def __init__(self, path: Path, n_layers: int | None, convention: str) -> None:
        self.path, self.n_layers, self.convention = path, n_layers, convention
        self.values = read_json(path / "config.json")
        self.notes: list[str] = []
        self.formats: tuple[str, ...] = ()
        # speculators nests the layer's config; the other family is flat.
        self.nested = "transformer_layer_config" in self.values
        self.layer = self.section(self.values, "transformer_layer_config") if self.nested else self.values
        self.use_fc = bool(self.flag("use_aux_hidden_state", True))
        self.last_norm = bool(self.flag("use_last_layernorm", True))
        self._refuse_unexpressed()

    def find(self, name: str) -> tuple[Any, str]:
        """A value at the top or under `eagle_config`, and where; (None, "") if absent or null."""
        eagle = self.section(self.values, "eagle_config")
        places = (("config.json", self.values), ("config.json: eagle_config", eagle))
        found = [(v[name], f"{place}: {name}") for place, v in places if v.get(name) is not None]
        if len(found) == 2 and found[0][0] != found[1][0]:
            note = f"{name} {found[0][0]} at the top and {found[1][0]} under eagle_config: the former is used"
            if note not in self.notes:
                self.notes.append(note)
        return found[0] if found else (None, "")

    def setting(self, name: str, default: Any, why: str) -> tuple[Any, Source]:
        """A config value with its source; absent or null means `default`, which is then noted."""
        value, place = self.find(name)
        if value is not None:
            return value, Source("checkpoint", place)
        self.notes.append(f"{name} not in config.json: {default!r} ({why})")
        return default, Source("framework default", why)

    def flag(self, name: str, default: bool) -> bool:
        """A true or false of the config; absent or null means the default."""
        value, _ = self.find(name)
        return default if value is None else self.boolean(name, value)

    def boolean(self, name: str, value: Any) -> bool:
        """The value, if it is true or false."""
        if not isinstance(value, bool):
            raise CheckpointError(
                self.path / "config.json", name, expected="true or false", found=repr(value),
                remedy="write it without quotes",
            )  # fmt: skip
        return value

    def _refuse_unexpressed(self) -> None:
        for name, fine, meaning in UNEXPRESSED:
            value, _ = self.find(name)
            value = self.layer.get(name) if value is None else value
            if value is not None and value != fine:
                raise CheckpointError(
                    self.path / "config.json", name, expected=f"{fine!r}, what this forward computes",
                    found=f"{value!r}: {meaning}", remedy="evaluate it in the framework that trained it",
                )  # fmt: skip
        if "sliding_attention" in str(self.layer.get("layer_types")):
            self.notes.append("layer_types: sliding_attention is computed as full attention")

    def heads(self, hidden: int) -> tuple[int, int, int]:
        """Query heads, key-value heads and head size."""
        heads = self.whole(self.layer, "num_attention_heads")
        kv_heads = self.whole(self.layer, "num_key_value_heads", heads)
        return heads, kv_heads, self.whole(self.layer, "head_dim", max(1, hidden // heads))

    def grouped_heads(self, hidden: int) -> tuple[int, int, int]:
        """`heads` for plain attention: checked against each other and rotary, with notes on defaults."""
        heads, kv_heads, head_dim = self.heads(hidden)
        if heads % kv_heads:
            raise CheckpointError(
                self.path / "config.json", "num_key_value_heads", expected=f"a divisor of {heads} heads",
                found=str(kv_heads), remedy="copy both numbers from the original export",
            )  # fmt: skip
        rotated = int(head_dim * self.partial())
        if rotated < 2 or rotated % 2:
            raise CheckpointError(
                self.path / "config.json", "head_dim", expected="pairs of rotated values, at least one",
                found=f"{rotated} rotated of {head_dim}", remedy="copy head_dim and partial_rotary_factor "
                "from the original export",
            )  # fmt: skip
        self.note_default("num_key_value_heads", kv_heads, "num_attention_heads, as transformers")
        self.note_default("head_dim", head_dim, "hidden_size / num_attention_heads, as transformers")
        return heads, kv_heads, head_dim

    def eps(self) -> float:
        """Of every RMSNorm."""
        value = float(self.number(self.layer, "rms_norm_eps", 1e-6))
        self.note_default("rms_norm_eps", value, "transformers' class default")
        return value

    def note_default(self, name: str, value: float, why: str) -> None:
        """Say once that the layer's config leaves `name` out and what is taken."""
        note = f"{name} not in config.json: {value:g} ({why})"
        if self.layer.get(name) is None and note not in self.notes:
            self.notes.append(note)

    def section(self, values: dict, name: str) -> dict:
        """A nested object of the config; absent or null means empty."""
        value = values.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(
                self.path / "config.json", name, expected="an object", found=repr(value),
                remedy="copy this part of config.json from the original export",
            )  # fmt: skip
        return value

    def number(self, values: dict, name: str, default: int | float | None = None):
        """A positive number of the config; absent or null means the default, if there is one."""
        value = default if values.get(name) is None else values[name]
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not 0 < value <= sys.float_info.max:  # JSON's whole numbers have no limit
            raise CheckpointError(
                self.path / "config.json", name, expected="a positive number", found=repr(value),
                remedy="write the value the draft was trained with into config.json",
            )  # fmt: skip
        return value

    def whole(self, values: dict, name: str, default: int | None = None) -> int:
        """A whole number from 1 of the config, within 64 bits; 3.0 is 3."""
        value = self.number(values, name, default)
        if value != int(value) or value >= 2**63:
            raise CheckpointError(
                self.path / "config.json", name, expected="a whole number from 1", found=repr(value),
                remedy="copy this part of config.json from the original export",
            )  # fmt: skip
        return int(value)

    def contract(
        self, slots: int, *, has_fc_norm: bool, has_input_norm: bool, has_map: bool, latent: bool = False
    ) -> Contract:
        """The declared contract, checked against which tensors the file holds.

        Args:
            slots: of `fc`; 1 without it.
            latent: the attention is DeepSeek's, whose rotary pairs are interleaved unless said otherwise.
        """
        sources: dict[str, Source] = {}
        residual, sources["norm_before_residual"] = self.setting(
            "norm_before_residual", False, "EAGLE, SGLang, vLLM for raw configs"
        )
        self.boolean("norm_before_residual", residual)
        head_norm, feedback, sources["feedback"] = self._output()
        sources["head_norm"] = sources["feedback"]
        if has_input_norm and has_fc_norm:
            raise CheckpointError(
                self.path, "fc_norm", expected="input_norm or fc_norm, not both", found="both",
                remedy="remove the one that the draft was trained without",
            )  # fmt: skip
        for flag, present in (("norm_before_fc", has_input_norm), ("fc_norm", has_fc_norm)):
            declared = self.flag(flag, False)
            if declared != present:
                raise CheckpointError(
                    self.path, flag, expected=f"tensors to match config.json ({flag}={declared})",
                    found="the tensors" if present else "no such tensors",
                    remedy="config and weights disagree; an engine would drop one silently (fault 16)",
                )  # fmt: skip
        kind = "input_norm" if has_input_norm else "fc_norm" if has_fc_norm else "none"
        sources["fc_input_norm"] = Source("checkpoint", "tensors present in the file")
        sources["vocab_map"] = Source("checkpoint", "d2t present" if has_map else "no d2t")
        taps, sources["taps"] = self._taps(slots)
        if not self.use_fc:
            sources["use_fc"] = Source("checkpoint", self.find("use_aux_hidden_state")[1])
        rope, sources["rope"] = self._rope()
        if latent:
            rope = replace(rope, interleaved=self._interleaved())
        return Contract(
            taps=taps, norm_before_residual=residual, fc_input_norm=kind, use_fc=self.use_fc,
            head_norm=head_norm, feedback=feedback, rope=rope,
            vocab_map="offset" if has_map else "identity", sources=sources,
        )  # fmt: skip

    def _output(self) -> tuple[bool, Literal["pre_norm", "post_norm"], Source]:
        """What lm_head sees and what is fed back: `norm_output` means two things.

        SpecForge up to 0.2.0 (`llama3_eagle.py:compute_logits`): whether lm_head sees norm(h); h itself is
        fed back either way. vLLM, SGLang, speculators, Automodel: whether norm(h) is fed back.
        """
        if not self.last_norm:
            return False, "pre_norm", Source("checkpoint", self.find("use_last_layernorm")[1])
        output, source = self.setting("norm_output", False, "EAGLE-3 as published")
        self.boolean("norm_output", output)
        if source.origin != "checkpoint" or "specforge" not in self.formats:
            return True, "post_norm" if output else "pre_norm", source
        readings = {
            "SpecForge up to 0.2.0": (output, "pre_norm"),
            "vLLM, SGLang and later SpecForge": (True, "post_norm" if output else "pre_norm"),
        }
        # A file that only SpecForge could have written is read as SpecForge trained it.
        own = list(readings)[0 if self.formats == ("specforge",) else 1]
        says = "; ".join(
            f"{who}: lm_head sees {'norm(h)' if head else 'h'}, "
            f"{'norm(h)' if fed == 'post_norm' else 'h'} is fed back"
            for who, (head, fed) in readings.items()
        )
        self.notes.append(f"norm_output={output} is read as {own} does ({says}; fault 17)")
        return *readings[own], Source("checkpoint", f"{source.detail}, read as {own} does")

    def _interleaved(self) -> bool:
        value = self.layer.get("rope_interleave")
        if value is None:
            self.notes.append("rope_interleave not in config.json: True (transformers, DeepSeek-V3)")
            return True
        return self.boolean("rope_interleave", value)

    def _taps(self, slots: int) -> tuple[tuple[Tap | Normed, ...], Source]:
        if not self.use_fc:
            self.notes.append(
                "use_aux_hidden_state is false: the one input is the target's last state after its final "
                'norm (tap "normed"); name a stored state so, or recapture'
            )
            return (Normed(),), Source("checkpoint", self.find("use_aux_hidden_state")[1])
        ids, source = self.setting(IDS, None, "(2, n//2, n-3), EAGLE modeling_llama_kv.py")
        if ids is None or ids == []:
            if self.n_layers is None:
                raise CheckpointError(
                    self.path / "config.json", IDS,
                    expected="tap ids, or a target whose depth gives the default triple",
                    found="neither", remedy="pass target=, or write the ids into config.json",
                )  # fmt: skip
            taps: tuple[Tap, ...] = default_triple(self.n_layers)
            if ids == []:
                source = Source("framework default", "an empty list; (2, n//2, n-3)")
                self.notes.append(f"{IDS} is empty: the default triple {[str(t) for t in taps]}")
        else:
            taps, source = self._read_ids(ids, source)
        if len(taps) != slots:
            raise CheckpointError(
                self.path / "config.json", IDS,
                expected=f"{slots} ids, one per slot of fc.weight", found=f"{len(taps)}: {taps}",
                remedy="weights and config are of different drafts",
            )  # fmt: skip
        stated = self.values.get("num_aux_hidden_states")
        if stated is not None and stated != slots:
            raise CheckpointError(
                self.path / "config.json", "num_aux_hidden_states",
                expected=f"{slots}, the slots of fc.weight", found=repr(stated),
                remedy="weights and config are of different drafts",
            )  # fmt: skip
        return taps, source

    def _read_ids(self, ids: Any, source: Source) -> tuple[tuple[Tap, ...], Source]:
        """The taps that ids name under `convention`, with a note of the readings that differ."""
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise CheckpointError(
                self.path / "config.json", IDS, expected="a list of whole numbers", found=repr(ids),
                remedy="fix the config",
            )  # fmt: skip
        n = self.n_layers if self.n_layers else max(ids, default=0) + 1
        try:
            taps = taps_from_ids(ids, self.convention, n)
        except ContractError as err:
            if err.where == "convention":  # the caller's argument, not the file
                raise
            raise CheckpointError(
                self.path / "config.json", err.field, expected=err.expected, found=err.found,
                remedy=err.remedy,
            ) from err  # fmt: skip
        # speculators' ids are vLLM's boundaries; every other file leaves room for doubt.
        certain = self.formats == ("speculators",) and CONVENTIONS[self.convention].offset == 0
        if not certain:
            others = {w: t for w, t in hypotheses(ids, n).items() if t != taps and "ignored" not in w}
            self.notes.extend(
                f"{IDS} {ids} could also mean {', '.join(map(str, other))}: {why}"
                for why, other in others.items()
            )
        return taps, Source("checkpoint", f"{source.detail}, read as {self.convention} does")

    def _rope(self) -> tuple[Rope, Source]:
        new, old = (self.section(self.layer, name) for name in ("rope_parameters", "rope_scaling"))
        flat = self.layer.get("rope_theta")
        values = dict(new or old)
        nested = sorted(k for k, v in values.items() if isinstance(v, dict))
        if nested:
            raise CheckpointError(
                self.path / "config.json", "rope_parameters", expected="one set of rotary parameters",
                found=f"one per kind of layer: {nested}", remedy="write the draft's own set alone",
            )  # fmt: skip
        theta = values.pop("rope_theta", flat)
        for stated in (flat, theta):
            self.number({"rope_theta": stated}, "rope_theta", 10000.0)
        kind = values.pop("rope_type", values.pop("type", "default"))
        values.pop("partial_rotary_factor", None)
        if flat is not None and theta != flat:
            part = "rope_parameters" if new else "rope_scaling"
            self.notes.append(
                f"rope_theta {flat:g} and {part}.rope_theta {theta:g} disagree: the latter is used (fault 11)"
            )
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise CheckpointError(
                self.path / "config.json", "rope_type", expected="default, linear, llama3 or yarn",
                found=repr(kind), remedy="this rotary variant is not supported",
            )  # fmt: skip
        if theta is None:
            self.notes.append("rope_theta not in config.json: 10000 (transformers' class default)")
            theta, source = 10000.0, Source("framework default", "transformers, 10000")
        else:
            source = Source("checkpoint", "config.json: " + ("rope_parameters" if new else "rope_theta"))
        params = self._rope_params(kind, values)
        return Rope(float(theta), kind, tuple(sorted(params.items())), partial=self.partial()), source

    def partial(self) -> float:
        """Share of a head that is rotated, above 0 and at most 1."""
        scaling = self.section(self.layer, "rope_parameters") or self.section(self.layer, "rope_scaling")
        name = "partial_rotary_factor"
        value = float(self.number({name: scaling.get(name, self.layer.get(name))}, name, 1.0))
        if value > 1:
            raise CheckpointError(
                self.path / "config.json", name, expected="a share of the head, at most 1",
                found=repr(value), remedy="copy this part of config.json from the original export",
            )  # fmt: skip
        return value

    def _rope_params(self, kind: str, values: dict[str, Any]) -> dict[str, float]:
        """Numbers and flags of a rotary kind, complete: transformers' formulas would fail or guess later."""
        length, where = "original_max_position_embeddings", self.path / "config.json"
        if kind in ("llama3", "yarn"):
            # transformers (modeling_rope_utils.py:standardize_rope_params): the flat key comes first, and
            # without any the config's own length stands in.
            flat = self.layer.get(length)
            if flat is not None:
                if values.get(length) not in (None, flat):
                    self.notes.append(f"{length} {values[length]} and {flat} at the top: the latter is used")
                values[length] = flat
            if values.get(length) is None:
                values[length] = self.whole(self.layer, "max_position_embeddings")
                self.notes.append(
                    f"{length} not in the rotary parameters: {values[length]}, max_position_embeddings "
                    "(as transformers)"
                )
        for name in ROPE_NEEDS[kind]:
            self.number(values, name)
        params: dict[str, float] = {}
        for name, value in values.items():
            if name in ROPE_FLAGS and value is not None:
                params[name] = self.boolean(name, value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                if not abs(value) <= sys.float_info.max:
                    raise CheckpointError(
                        where, name, expected="a finite number", found=repr(value)[:80],
                        remedy="copy the rotary parameters from the original export",
                    )  # fmt: skip
                params[name] = float(value)
            elif name in ROPE_NUMBERS and value is not None:
                raise CheckpointError(
                    where, name, expected="a number", found=repr(value)[:80], remedy="write it without quotes"
                )
            elif value is not None:
                self.notes.append(f"rotary parameter {name} is not used: {str(value)[:60]}")
        for name in ROPE_POSITIVE & params.keys() if kind != "default" else ():
            self.number(params, name)
        low, high = (params.get(f"{side}_freq_factor", 0.0) for side in ("low", "high"))
        if kind == "llama3" and low >= high:
            raise CheckpointError(
                where, "high_freq_factor", expected=f"more than low_freq_factor {low:g}", found=f"{high:g}",
                remedy="copy the rotary parameters from the original export",
            )  # fmt: skip
        return params
