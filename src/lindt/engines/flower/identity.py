"""A node's own key: with it a node that comes back under another id proves that it held its clients before.

It is an Ed25519 key in `node.key`, beside the v_i. It is made when the node first connects to a server, and only its
user can read it. The server sends a random challenge with each greeting; the node signs the challenge together with its
id. The server stores the public key.
Limit: a folder that is used in two federations has one key for both, and the server of one federation could pass on the
challenge of the other.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lindt.errors import UserError
from lindt.runs.files import locked

KEY_FILE: Final = "node.key"
BYTES: Final = 32  # of a private key, of a public one and of a challenge


def new_challenge() -> str:
    return secrets.token_hex(BYTES)


def proof(folder: Path, node: int, challenge: object) -> dict[str, str]:
    """On the node: its public key, and the signed challenge. Empty if the challenge is not one of lindt's."""
    if not isinstance(challenge, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * BYTES}}}", challenge):
        return {}
    key = _key(folder)
    return {"key": key.public_key().public_bytes_raw().hex(), "signature": key.sign(_statement(node, challenge)).hex()}


def proven_key(about: Mapping[str, Any], node: int, challenge: str) -> str:
    """On the server: the public key whose possession the node has proven; "" without a valid proof."""
    key, signature = about.get("key"), about.get("signature")
    if not isinstance(key, str) or not isinstance(signature, str):
        return ""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
            bytes.fromhex(signature), _statement(node, challenge)
        )
    except (ValueError, InvalidSignature):
        return ""
    return key.lower()


def _statement(node: int, challenge: str) -> bytes:
    return f"lindt: I am node {node}, challenge {challenge}".encode()


def _key(folder: Path) -> Ed25519PrivateKey:
    path = folder / KEY_FILE
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{KEY_FILE}.lock", wait=math.inf, busy=""):
        if not path.exists():
            aside = path.with_name(f".{KEY_FILE}.{os.getpid()}")
            aside.unlink(missing_ok=True)
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(Ed25519PrivateKey.generate().private_bytes_raw().hex())
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text()))
    except ValueError:
        raise UserError(
            f"{path} is damaged; restore it, or delete it: the server then treats this node as a new one"
        ) from None
