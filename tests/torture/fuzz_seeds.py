"""Good inputs of every parser that meets untrusted bytes, made by code: what a fuzzer starts from and changes."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from folders import about, mended, plan, write_run
from PIL import Image

from lindt.data.shakespeare import PROJECT, VERSION
from lindt.engines.flower.wire import EngineSession, pack_replies, pack_tasks
from lindt.environment import Environment
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor, Until
from lindt.flower.protocol import ClientReport, Instruction
from lindt.plan.file import PRESETS, to_dict
from lindt.plan.plan import METHODS, Plan
from lindt.protocols import Buffers, ClientTally, Reply, Task
from lindt.runs.files import seal

CUT = b"\n=====\n"  # between the files of a run
FILES = ("run.json", "plan.toml", "rounds.jsonl", "timing.jsonl", "summary.json")
RUN = "0" * 32
PLAYS = ("hamlet", "macbeth")  # of the 37
PICTURES = 2  # rows of a sheet, in place of 10,000
W = torch.arange(3, dtype=torch.float32)
BUFFERS = Buffers(torch.tensor([0.5]), torch.tensor([7]))


def plans() -> list[bytes]:
    named = [tomli_w.dumps(to_dict(Plan(method=method))) for method in METHODS.values()]
    odd = Environment(threat=Until(9, Backdoor()), privacy=Gaussian(S=3.0, sigma=1e-7))
    sets = '\n#set environment.privacy.sigma=0.003\n#set method.recovery.patience=5\n#set method="lindt"\n'
    texts = [*named, tomli_w.dumps(to_dict(Plan(environment=odd))) + sets, sets]
    texts += [path.read_text() for path in PRESETS.glob("*.toml")]
    return [text.encode() for text in texts]


def runs() -> list[bytes]:
    noisy = plan(environment={"privacy": {"kind": "gaussian", "S": 15.0, "sigma": 0.001}})
    found = []
    with tempfile.TemporaryDirectory() as name:
        for ended, tables in ((True, plan()), (False, noisy)):
            folder = write_run(Path(name) / str(ended), mended(), ended=ended, the_plan=tables)
            pieces = [(folder / file).read_bytes() for file in FILES if (folder / file).exists()]
            found.append(CUT.join(pieces))
    return found


def sealed() -> list[bytes]:
    tensors = {"w": W, "floats": BUFFERS.floats_F, "counts": BUFFERS.counts_I}
    recovery = {"on": True, "count": 3, "quiet": 0, "detections": 1, "treated": [1, 2]}
    told = {"format": 2, "run": RUN, "round": 3, "recovery": recovery, "private": [[0, 2]], "secret": "ab" * 16}
    words = json.dumps(told, sort_keys=True)
    alone = seal({"scores": torch.tensor([1.0, 0.0, 1.0])}, {"key": "5"})
    return [seal(tensors, {"about": words}), seal({"v": W}, {"notes": '{"a": 1.0}'}), alone, words.encode()]


def tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return content.getvalue()


def official() -> dict[str, bytes]:
    batches = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    return {f"cifar-10-batches-bin/{name}.bin": bytes([3]) + bytes(3072) for name in batches}


def package() -> dict[str, bytes]:
    picture = io.BytesIO()
    Image.new("RGB", (1024, PICTURES)).save(picture, "PNG")
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    labels = {f"package/{part}_lables.json": b"[1, 9]" for part in ("train", "test")}
    return {f"package/{name}.png": picture.getvalue() for name in names} | labels


def mnist() -> dict[str, bytes]:
    def idx(*sizes: int) -> bytes:
        head = (0x800 + len(sizes)).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in sizes)
        return head + bytes(int(np.prod(sizes)))

    parts = ("train", "t10k")
    pictures = {f"package/data/{part}-images-idx3-ubyte": idx(1, 28, 28) for part in parts}
    return pictures | {f"package/data/{part}-labels-idx1-ubyte": idx(1) for part in parts}


def plays() -> dict[str, bytes]:
    text = b"TITLE\n\nACT I.\n\n[Enter.]\n\nHAM.\nTo be, or not to be.\n\nKING. Who speaks?\n\nHAM.\n{aside} I.\n"
    return {f"{PROJECT}-{VERSION}/shksprdata/texts/{play}_gut.txt": text for play in PLAYS}


def archives() -> list[bytes]:
    tars = [tar(files()) for files in (official, package, mnist, plays)]
    return [*tars, gzip.compress(tars[-1])]


def arrays() -> list[bytes]:
    found = []
    for array in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.ones(3, dtype=np.float32), np.array(7)):
        file = io.BytesIO()
        np.save(file, array)
        found.append(file.getvalue())
    file = io.BytesIO()
    np.savez(file, np.arange(3))
    return [*found, file.getvalue()]


def answers() -> list[bytes]:
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-9/10\r\nContent-Length: 5\r\n\r\nabcde"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
    settings = b"global.cert='/a/b.pem'\n:env:.proxy='http://a:3128'\n"
    return [head, chunked, b"HTTP/1.1 200 OK\r\n\r\nabcde", b"HTTP/1.0 416 No\r\n\r\n", settings]


def requests() -> list[bytes]:
    host, cookie = b"Host: 127.0.0.1:8471\r\n", b"Cookie: lindt-8471=0\r\nAuthorization: Bearer x\r\n"
    targets = [
        b"/", b"/?token=a-token-that-is-long-enough", b"/api/runs", b"/api/run?id=one", b"/api/run?id=set/two",
        b"/api/run?id=../secret", b"/api/run?id=%2e%2e%2fsecret", b"/api/run?id=linked", b"/api/events",
        b"/api/events?id=one&have=3", b"/api/events?id=one&have=0&id=set/two&have=99",
    ]  # fmt: skip
    found = [b"GET " + target + b" HTTP/1.1\r\n" + host + cookie + b"\r\n" for target in targets]
    form = b"token=a-token-that-is-long-enough"
    length = str(len(form)).encode()
    found.append(b"POST /enter HTTP/1.1\r\n" + host + b"Content-Length: " + length + b"\r\n\r\n" + form)
    return [*found, b"HEAD /api/events HTTP/1.1\r\nHost: [::1]:8471\r\n\r\n"]


def wire(content: RecordDict | Error, kind: str = "train") -> bytes:
    # A message takes its sender from the process's identity, which a SuperLink would have set.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    asked = Message(RecordDict(), 7, kind)
    message = Message(content, reply_to=asked)
    return bytes(message_to_proto(message).SerializeToString(deterministic=True))


def weights(**values: Any) -> ArrayRecord:
    given = values or {"weight": [[1.0, 2.0]], "bias": [0.5]}
    return ArrayRecord({name: Array(np.array(value, dtype=np.float32)) for name, value in given.items()})


def tasks() -> list[bytes]:
    task = Task("train", "ab", 0, 3, W, BUFFERS, True, 1)
    ours = wire(pack_tasks([task], EngineSession("cd", 2)))
    ordered = Message(RecordDict({"arrays": weights(), "config": ConfigRecord({"proximal-mu": 0.1})}), 7, "train")
    Instruction("exp", "ses", 0, 3, 1, True).put(ordered)
    return [ours, wire(ordered.content)]


def replies() -> list[bytes]:
    pair = torch.tensor([3.0, 4.0], dtype=torch.float64)
    tally = ClientTally(4, pair, pair, pair, 1, 1)
    ours = [Reply(0, 3, 5, W, BUFFERS), Reply(0, 3, 5, tally=tally, notes={"a": 1.0}), Reply(0, 3, 0, fault="no")]
    metrics = MetricRecord({"num-examples": 5, "train_loss": 0.5})
    trained = RecordDict({"arrays": weights(), "metrics": metrics})
    tested = RecordDict({"metrics": MetricRecord({"num-examples": 5, "accuracy": 0.5})})
    ClientReport("a", tally).attach(tested)
    greeting = ConfigRecord({"about": json.dumps({"held": [0], "clients": 2, "parameters": 3})})
    contents = [*(pack_replies([reply]) for reply in ours), trained, tested, RecordDict({"clients": greeting})]
    return [*(wire(content) for content in contents), wire(Error(1, "it failed"))]


def shelves(folder: Path) -> Path:
    """Runs to ask a server for, one that nobody may see, and a link to it."""
    root = folder / "runs"
    write_run(root / "one", mended())
    write_run(root / "set" / "two", mended()[:4], ended=False)
    write_run(folder / "secret", mended(), the_about=about(name="a-secret-name"))
    if not (root / "linked").is_symlink():
        (root / "linked").symlink_to(folder / "secret")
    return root
