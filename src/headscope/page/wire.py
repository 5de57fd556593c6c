"""How numbers travel to the page: JSON, and for matrices a JSON head followed by their raw values.

`uint32 length of the JSON (little endian) | JSON, padded with spaces to a multiple of 4 | values`; the JSON has `shape`
and `dtype` (float32 or float16).
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np


def finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def matrix(values: np.ndarray, dtype: str, **head: Any) -> bytes:
    """A matrix with what else there is to say about it."""
    data = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    text = json.dumps(finite({**head, "shape": list(values.shape), "dtype": dtype}), allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<I", len(text)) + text + data.tobytes()
