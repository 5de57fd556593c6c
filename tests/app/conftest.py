"""A tiny model whose vocabulary holds markup, an atlas of it, and a server of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers

import headscope as hs
from app.browser import Watched, chromium, running
from families.tiny import build
from headscope.app.server import create
from headscope.app.session import Session
from headscope.model import Model
from headscope.verify import Verdict

HOST = "127.0.0.1:8642"
HOSTILE = "<img/src=x/onerror=alert(1)>"


def tokenizer() -> Any:
    """96 words; one of them is markup."""
    words = ["<pad>", "<unk>", HOSTILE, "</script>", "the", "a", "Mary", "John", "store", "&amp;", '"quoted"']
    words += [f"w{i}" for i in range(96 - len(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")


def verdict(role: str, heads: list[str], state: str, **changed: Any) -> Verdict:
    """A verdict as a scan would give it."""
    given: dict[str, Any] = {
        "role": role, "claim": f"something needs these heads {HOSTILE}", "method": "previous-token", "intervention": "zero",
        "k": len(heads), "components": heads, "metric": "loss", "direction": 1, "clean": 2.0, "effect": 3.0,
        "control_mean": 0.5, "control_sd": 0.1, "control_extreme": 0.8, "diff_ci_low": 2.0, "diff_ci_high": 2.9,
        "margin": 0.2, "p": 0.01, "p_raw": 0.005, "n_seeds": 12, "n_controls": 3, "side_effect": 0.1, "verdict": state,
        "reason": "effect +3 against +0.5", "dose": [{"k": 1.0, "effect": 1.0, "control_mean": 0.2},
        {"k": 2.0, "effect": 3.0, "control_mean": 0.5}], "control_effects": [0.4, 0.5, 0.6],
    }  # fmt: skip
    return Verdict(**(given | changed))


@pytest.fixture(scope="session")
def model() -> Model:
    inner = build("llama", torch.float32)
    inner.config.max_position_embeddings = 4096  # its positions are rotations, of which there are as many as one likes
    return hs.load(inner, tokenizer=tokenizer())


@pytest.fixture(scope="session")
def atlas(model: Model) -> hs.Atlas:
    """3 layers × 4 heads: two methods, a signed one, one supported and one inconclusive role."""
    found = hs.scan(model, "bos-sink,previous-token", n_seeds=5, n_controls=2)
    signed = hs.score(model, "previous-token")
    signed = signed.copy(data=signed.values - signed.values.mean())
    signed[0, 0] = float("nan")
    signed.attrs["method"] = "signed"
    found.scores["signed"] = signed
    found.verdicts = [
        verdict("induction", ["L1H2", "L2H3"], "supported"),
        verdict("sink", ["L0H1"], "inconclusive", side_effect=float("nan")),
    ]
    found.model["name"] = "tiny <b>bold</b>"
    found.skipped["role x"] = "The role x was not tested."
    return found


@pytest.fixture
def session(model: Model, atlas: hs.Atlas, tmp_path: Path) -> Iterator[Session]:
    made = Session(name="tiny", load=lambda: model, atlas=atlas, out=tmp_path / "runs")
    yield made
    made.jobs.close()


@pytest.fixture
def client(session: Session) -> TestClient:
    return serve(session)


def serve(session: Session, **options: Any) -> TestClient:
    """A client of the server, at the address that it prints."""
    app = create(session, **({"hosts": {HOST}} | options))
    return TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def served(session: Session) -> Iterator[str]:
    with running(session) as address:
        yield address


@pytest.fixture
def view(browser: Any, served: str) -> Iterator[Callable[..., Any]]:
    """Open an address of the server in a new page; at the end nothing may have gone wrong in any."""
    opened: list[Watched] = []

    def make_page(path: str, *, width: int = 1280, base: str = served, refusals: bool = False, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        opened.append(Watched(context, base, refusals))
        return opened[-1].open(path)

    yield make_page
    for watched in opened:
        assert watched.problems == []
        assert watched.page.evaluate("document.querySelectorAll('img, iframe, main script').length") == 0
        watched.page.context.close()


@pytest.fixture
def refused() -> Callable[..., None]:
    """The answer is one sentence in JSON, with the security headers that every answer has."""

    def check(response: Any, status: int, *words: str) -> None:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.endswith((".", "?")) and "\n" not in error and "Traceback" not in error
        assert all(word in error for word in words), error
        assert response.headers["x-content-type-options"] == "nosniff"

    return check
