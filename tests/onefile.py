"""What a saved report carries within itself."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np


def carried(path: Path) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], np.ndarray]]]:
    """The JSON answers by address, and the matrices as (head, values)."""
    (packed,) = re.findall(
        r'<script type="text/plain" id="answers">([A-Za-z0-9+/=]*)</script>', path.read_text("utf-8")
    )
    document = json.loads(gzip.decompress(base64.b64decode(packed)))
    matrices = {}
    for address, text in document["matrices"].items():
        data = base64.b64decode(text)
        (length,) = struct.unpack("<I", data[:4])
        head = json.loads(data[4 : 4 + length])
        matrices[address] = head, np.frombuffer(data[4 + length :], head["dtype"]).reshape(head["shape"])
    return document["documents"], matrices
