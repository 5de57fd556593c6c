"""Answers to the page as responses."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from headscope.page.wire import finite, matrix

MEDIA = "application/octet-stream"


def as_json(document: Any, status: int = 200) -> Response:
    """One JSON document."""
    return JSONResponse(finite(document), status_code=status)


def as_matrix(values: np.ndarray, dtype: str, **head: Any) -> Response:
    """A matrix with what else there is to say about it."""
    return Response(matrix(values, dtype, **head), media_type=MEDIA)
