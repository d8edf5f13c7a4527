"""Hub ids: which files are asked for, what is said when they cannot be had. The hub is a local server.

Every resolve runs in a process of its own: huggingface_hub reads its settings when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
import torch

from lib import hub
from lib.checkpoints import load_draft
from lib.errors import CaptureError, CheckpointError, TargetError
from lib.hub import resolve
from lib.target_head import load_target_head
from tests.conftest import ROOT
from tests.support import (
    read_checkpoint,
    speculators_draft,
    tiny_llama,
    to_midlayer,
    write_checkpoint,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
JUNK = (".gitattributes", "README.md", "modeling_draft.py", "onnx/model.safetensors", "pytorch_model.bin")


class Hub:
    """A server that speaks the hub's protocol for repositories of a dict, and remembers what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}  # "models/owner/name" -> path -> content
        self.gated: set[str] = set()
        self.broken: set[str] = set()  # file names whose download ends half-way
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                owner.answer(self)

            def do_GET(self):
                owner.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, repo: str, folder: Path | None = None, **files: bytes) -> None:
        content = {}
        if folder:
            content = {
                f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
            }
        self.repos[repo] = content | files

    def files(self) -> list[str]:
        """Paths of the files whose content was sent."""
        return sorted(
            path.partition(f"/{COMMIT}/")[2]
            for how, path in self.asked
            if how == "GET" and "/resolve/" in path
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path))
        self.headers.append(dict(request.headers))
        api = path.startswith("/api/")
        key = path[5:] if api else path[1:] if path.startswith("/datasets/") else "models" + path
        repo = next((name for name in self.repos if key.startswith(name + "/")), None)
        if repo is None or "/telemetry" in path:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})
        action, _, rest = key[len(repo) + 1 :].partition("/")
        revision, _, name = rest.partition("/")
        if repo in self.gated and not (api and action == "revision"):
            return self.send(request, 403, {"X-Error-Code": "GatedRepo"})
        if revision not in ("main", "v1", COMMIT):
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        files = self.repos[repo]
        if action == "revision":
            siblings = [{"rfilename": f} for f in files]
            return self.json(request, {"id": repo.partition("/")[2], "sha": COMMIT, "siblings": siblings})
        if action == "tree":
            entries = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in files.items()
            ]
            return self.json(request, entries)
        if action == "resolve" and name in files:
            etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
            head = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            return self.send(request, 200, head, files[name], cut=name in self.broken)
        return self.send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def json(self, request, value) -> None:
        self.send(request, 200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, request, status: int, headers: dict, body: bytes = b"", cut: bool = False) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[: len(body) // 2] if cut else body)
        request.close_connection = True


@pytest.fixture
def server():
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def ask(server, tmp_path):
    """resolve() in a process of its own: the folder or its error; of several pairs a list of both."""
    code = (
        "import pickle, sys\nfrom lib.errors import WorkbookError\nfrom lib.hub import resolve\n"
        "answers = []\n"
        "for name, kind in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    try:\n        answers.append(resolve(name, kind))\n"
        "    except WorkbookError as err:\n        answers.append(err)\n"
        "sys.stdout.buffer.write(pickle.dumps(answers))"
    )

    def run(*pairs: str, offline: str | None = "0", endpoint: str = ""):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        env |= {"HF_ENDPOINT": endpoint or server.url, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"}
        env |= {"HF_HUB_OFFLINE": offline} if offline is not None else {}
        command = [sys.executable, "-c", code, *pairs]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        answers = pickle.loads(done.stdout)
        if len(answers) > 1:
            return answers
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    return run


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, Path]:
    """The same draft as one file of safetensors, as shards, as a pickle, and with an unusual file name."""
    folder = tmp_path_factory.mktemp("drafts")
    speculators_draft().save_pretrained(folder / "saved")
    tensors, config = read_checkpoint(folder / "saved")
    made = {"one": write_checkpoint(folder / "one", tensors, config)}
    made["shards"] = write_checkpoint(folder / "shards", tensors, config, shards=2)
    named, flat = to_midlayer(tensors, config)
    made["pickle"] = write_checkpoint(folder / "pickle", named, flat, kind="bin")
    made["odd"] = write_checkpoint(folder / "odd", tensors, config)
    (made["odd"] / "model.safetensors").rename(made["odd"] / "draft.safetensors")
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A target of several shards, most of which hold nothing that a draft needs."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_an_existing_path_is_returned_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner/name").mkdir(parents=True)
    for kind in hub.ERRORS:
        assert resolve("owner/name", kind) == Path("owner/name")
    assert resolve(tmp_path, "draft") == tmp_path


@pytest.mark.parametrize(
    ("form", "junk", "expected"),
    [
        ("one", JUNK, ["config.json", "model.safetensors"]),
        (
            "shards",
            JUNK,
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
        ),
        ("pickle", JUNK[:4], ["config.json", "pytorch_model.bin"]),
        ("odd", JUNK, ["config.json", "draft.safetensors"]),
    ],
)
def test_of_a_draft_only_its_own_files_are_fetched(ask, server, drafts, form, junk, expected):
    server.add("models/o/draft", drafts[form], **{n: n.encode() for n in junk})
    folder = ask("o/draft", "draft")
    assert server.files() == expected
    assert folder.name == COMMIT
    assert sorted(str(f.relative_to(folder)) for f in folder.rglob("*")) == expected
    if form == "one":
        assert load_draft(folder).keys == load_draft(drafts["one"]).keys


def test_side_files_of_a_draft_come_along(ask, server, drafts):
    extra = {"hf_quant_config.json": b"{}", "eagle_meta.pt": b"meta", "training_args.bin": b"args"}
    server.add("models/o/draft", drafts["one"], **extra)
    folder = ask("o/draft", "draft")
    assert server.files() == ["config.json", "eagle_meta.pt", "hf_quant_config.json", "model.safetensors"]
    assert (folder / "eagle_meta.pt").read_bytes() == b"meta"


def test_of_a_target_only_the_shards_with_embedding_norm_and_head(ask, server, target):
    server.add("models/o/target", target, **{"tokenizer.json": b"{}", "hf_quant_config.json": b"{ }"})
    folder = ask("o/target", "target")
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[n] for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    assert len(set(index.values())) > len(needed) + 2  # so that there is something to leave out
    assert server.files() == sorted({"config.json", "model.safetensors.index.json"} | needed)
    # The reader agrees about which tensors are needed.
    ours, all_of_it = load_target_head(folder), load_target_head(target)
    for part in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(ours, part), getattr(all_of_it, part)), part


def test_a_target_of_one_file(ask, server, target, tmp_path):
    tiny_llama(tied=True).save_pretrained(tmp_path / "one")
    server.add("models/o/one", tmp_path / "one")
    folder = ask("o/one", "target")
    assert server.files() == ["config.json", "model.safetensors"]
    assert load_target_head(folder).n_layers == 6


def test_captures_come_from_a_dataset_repository_without_its_code(ask, server):
    names = (
        "data_0.pt",
        "rows_0-2000/data_1.ckpt.gz",
        "hidden_states/hs_0.safetensors",
        "sample_lengths.json",
    )
    server.add("datasets/o/captures", **{n: n.encode() for n in (*names, "load.py", "README.md", "a.png")})
    folder = ask("o/captures", "captures")
    assert server.files() == sorted(names)
    assert (folder / "rows_0-2000/data_1.ckpt.gz").is_file()


def test_nothing_phones_home(ask, server, drafts):
    server.add("models/o/draft", drafts["one"])
    ask("o/draft", "draft")
    assert {(how, path.split("/")[1]) for how, path in server.asked} == {
        ("GET", "api"),
        ("HEAD", "o"),
        ("GET", "o"),
    }
    agents = {h.get("user-agent", h.get("User-Agent", "")) for h in server.headers}
    assert not any("torch" in agent for agent in agents), agents


def test_a_second_time_nothing_is_downloaded_and_offline_nothing_is_asked(ask, server, drafts):
    server.add("models/o/draft", drafts["one"])
    first = ask("o/draft", "draft")
    server.asked.clear()
    assert ask("o/draft", "draft") == first
    assert server.files() == []
    server.asked.clear()
    for offline in ("1", None):  # not set counts as 1
        assert ask("o/draft", "draft", offline=offline) == first
    assert ask("o/draft", "draft", endpoint="http://127.0.0.1:9") == first  # the network went away
    assert server.asked == []


def test_a_revision_is_asked_for(ask, server, drafts):
    server.add("models/o/draft", drafts["one"])
    assert ask("o/draft@v1", "draft").name == COMMIT
    assert ("GET", "/api/models/o/draft/revision/v1") in server.asked
    server.asked.clear()
    assert ask(f"o/draft@{COMMIT}", "draft", offline="1").name == COMMIT
    with pytest.raises(CheckpointError, match=r"o/draft@v2: revision: .*leave out @revision"):
        ask("o/draft@v2", "draft")


@pytest.mark.parametrize("offline", ["1", None])
def test_an_id_that_is_not_cached_says_how_to_go_online(ask, server, offline):
    pairs = [("o/none", kind) for kind in hub.ERRORS]
    for (_, kind), answer in zip(pairs, ask(*chain(*pairs), offline=offline), strict=True):
        assert type(answer) is hub.ERRORS[kind]
        assert re.search(r"o/none: path: .*set HF_HUB_OFFLINE=0.*or give a local path", str(answer))
    assert server.asked == []


def test_half_a_snapshot_is_not_taken_for_a_whole_one(ask, server, drafts):
    server.add("models/o/draft", drafts["one"])
    folder = ask("o/draft", "draft")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only a part of it in the cache.*HF_HUB_OFFLINE=0"):
        ask("o/draft", "draft", offline="1")
    # A cache of an older library has no listing; then the files themselves are looked at.
    for listing in folder.parents[1].glob("trees/*"):
        listing.unlink()
    with pytest.raises(CheckpointError, match=r"found 1 files: .*the cache may hold only a part of it"):
        ask("o/draft", "draft", offline="1")


REFUSED = [
    (
        "o/none",
        "draft",
        CheckpointError,
        r"o/none: repository: expected a model of this name.*check the spelling",
    ),
    ("o/none", "captures", CaptureError, r"o/none: repository: expected a dataset of this name"),
    (
        "o/gated",
        "target",
        TargetError,
        r"o/gated: access: .*found gated.*accept its terms.*hf auth login",
    ),
    (
        "o/empty",
        "draft",
        CheckpointError,
        r"o/empty: config.json: expected this file.*found 1 files: \['README",
    ),
    (
        "o/config",
        "draft",
        CheckpointError,
        r"o/config: draft: expected model.safetensors or pytorch_model.bin, whole",
    ),
    ("o/empty", "captures", CaptureError, r"o/empty: captures: expected captures, found 1 files"),
    (
        "o/index",
        "target",
        TargetError,
        r"model.safetensors.index.json: expected its shard model-9.safetensors",
    ),
    ("o/map", "target", TargetError, r"expected weight_map: a dict"),
    ("o/json", "draft", CheckpointError, r"model.safetensors.index.json: json: expected a readable JSON"),
    ("o/broken", "draft", CheckpointError, r"o/broken: download: expected an answer from the hub"),
]


def test_what_the_hub_refuses_is_one_typed_error(ask, server):
    index = "model.safetensors.index.json"
    server.add("models/o/gated", **{"config.json": b"{}"})
    server.gated.add("models/o/gated")
    server.add("models/o/empty", **{"README.md": b"x"})
    server.add("datasets/o/empty", **{"README.md": b"x"})
    server.add("models/o/config", **{"config.json": b"{}"})
    weight_map = {"lm_head.weight": "model-9.safetensors"}
    server.add(
        "models/o/index", **{"config.json": b"{}", index: json.dumps({"weight_map": weight_map}).encode()}
    )
    server.add("models/o/map", **{"config.json": b"{}", index: b'{"weight_map": []}'})
    server.add("models/o/json", **{"config.json": b"{}", index: b"{"})
    server.add("models/o/broken", **{"config.json": b"{}", "model.safetensors": b"12345678"})
    server.broken.add("model.safetensors")
    answers = ask(*chain(*(row[:2] for row in REFUSED)))
    for (name, kind, error, message), answer in zip(REFUSED, answers, strict=True):
        assert type(answer) is error, (name, kind, answer)
        assert re.search(message, str(answer)), (message, str(answer))


def test_a_hub_that_does_not_answer_is_one_typed_error(ask):
    with pytest.raises(
        CheckpointError, match=r"o/draft: download: .*found ConnectError.*or give a local path"
    ):
        ask("o/draft", "draft", endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./owner/name", "~/draft", "draft", "a/b/c", "o/n@", "x" * 5000, "a\0b", ""]
)
def test_what_is_neither_a_path_nor_an_id_never_reaches_the_network(name, monkeypatch):
    monkeypatch.setattr(hub, "_Repository", None)
    with pytest.raises(CheckpointError, match="not the form of a hub id"):
        resolve(name, "draft")
