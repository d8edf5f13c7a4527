"""What a draft's `config.json` declares: sizes, flags, taps and rotary settings, each with its source.

Knows both shapes of config: speculators' (the layer nested under `transformer_layer_config`) and the
flat one of SGLang, SpecForge and EAGLE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.contract import Contract, Rope, Source
from lib.errors import CheckpointError, ContractError
from lib.taps import Tap, default_triple, taps_from_ids
from lib.weights import read_json


class DraftConfig:
    """`config.json` of a draft, asked field by field; every default taken goes into `notes`.

    Args:
        path: the draft's folder.
        n_layers: of the target, or None if it is not at hand.
        convention: whose reading of the tap ids to declare, a key of `taps.CONVENTIONS`.
    """

    def __init__(self, path: Path, n_layers: int | None, convention: str) -> None:
        self.path, self.n_layers, self.convention = path, n_layers, convention
        self.values = read_json(path / "config.json")
        self.notes: list[str] = []
        # speculators nests the layer's config; the other family is flat.
        self.nested = "transformer_layer_config" in self.values
        self.layer = self.section(self.values, "transformer_layer_config") if self.nested else self.values

    def setting(self, name: str, default: Any, why: str) -> tuple[Any, Source]:
        """A config value with its source; absent or null means `default`, which is then noted."""
        eagle = self.section(self.values, "eagle_config")
        for place, values in (("config.json", self.values), ("config.json: eagle_config", eagle)):
            if values.get(name) is not None:
                return values[name], Source("checkpoint", f"{place}: {name}")
        self.notes.append(f"{name} not in config.json: {default!r} ({why})")
        return default, Source("framework default", why)

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
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                self.path / "config.json", name, expected="a positive number", found=repr(value),
                remedy="write the value the draft was trained with into config.json",
            )  # fmt: skip
        return value

    def contract(self, slots: int, *, has_fc_norm: bool, has_input_norm: bool, has_map: bool) -> Contract:
        """The declared contract, checked against which tensors the file holds."""
        sources: dict[str, Source] = {}
        residual, sources["norm_before_residual"] = self.setting(
            "norm_before_residual", False, "EAGLE, SGLang, vLLM for raw configs"
        )
        output, sources["feedback"] = self.setting("norm_output", False, "EAGLE-3 as published")
        if has_input_norm and has_fc_norm:
            raise CheckpointError(
                self.path, "fc_norm", expected="input_norm or fc_norm, not both", found="both",
                remedy="remove the one that the draft was trained without",
            )  # fmt: skip
        for name, value in (
            ("norm_before_residual", residual),
            ("norm_output", output),
            *((flag, self.values.get(flag) or False) for flag in ("norm_before_fc", "fc_norm")),
        ):
            if value not in (True, False):
                raise CheckpointError(
                    self.path / "config.json", name, expected="true or false", found=repr(value),
                    remedy="write it without quotes",
                )  # fmt: skip
        for flag, present in (("norm_before_fc", has_input_norm), ("fc_norm", has_fc_norm)):
            declared = bool(self.values.get(flag))
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
        rope, sources["rope"] = self._rope()
        return Contract(
            taps=taps, norm_before_residual=bool(residual), fc_input_norm=kind,
            feedback="post_norm" if output else "pre_norm", rope=rope,
            vocab_map="offset" if has_map else "identity", sources=sources,
        )  # fmt: skip

    def _taps(self, slots: int) -> tuple[tuple[Tap, ...], Source]:
        ids, source = self.setting(
            "eagle_aux_hidden_state_layer_ids", None, "(2, n//2, n-3), EAGLE modeling_llama_kv.py"
        )
        if ids is None:
            if self.n_layers is None:
                raise CheckpointError(
                    self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                    expected="tap ids, or a target whose depth gives the default triple",
                    found="neither", remedy="pass target=, or write the ids into config.json",
                )  # fmt: skip
            taps: tuple[Tap, ...] = default_triple(self.n_layers)
        else:
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise CheckpointError(
                    self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                    expected="a list of whole numbers", found=repr(ids), remedy="fix the config",
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
            source = Source("checkpoint", f"{source.detail}, read as {self.convention} does")
        if len(taps) != slots:
            raise CheckpointError(
                self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                expected=f"{slots} ids, one per slot of fc.weight", found=f"{len(taps)}: {taps}",
                remedy="weights and config are of different drafts",
            )  # fmt: skip
        return taps, source

    def _rope(self) -> tuple[Rope, Source]:
        new, old = (self.section(self.layer, name) for name in ("rope_parameters", "rope_scaling"))
        flat = self.layer.get("rope_theta")
        values = dict(new or old)
        theta = values.pop("rope_theta", flat)
        for stated in (flat, theta):
            self.number({"rope_theta": stated}, "rope_theta", 10000.0)
        kind = values.pop("rope_type", values.pop("type", "default"))
        partial = self.layer.get("partial_rotary_factor")
        part = {"partial_rotary_factor": values.pop("partial_rotary_factor", partial)}
        partial = float(self.number(part, "partial_rotary_factor", 1.0))
        if new and flat is not None and new.get("rope_theta", flat) != flat:
            self.notes.append(
                f"rope_theta {flat:g} and rope_parameters.rope_theta {new['rope_theta']:g} disagree: "
                "the latter is used (fault 11)"
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
        numbers = {
            k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        return Rope(float(theta), kind, tuple(sorted(numbers.items())), partial=partial), source
