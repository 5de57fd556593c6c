"""Who may ask: other names, other sites, large requests and missing tokens are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.conftest import HOST, serve
from headscope.app.guard import MOST_BYTES, Guard, is_loopback
from headscope.app.launch import address, check_address, has_screen, listen, names
from headscope.app.session import Session
from headscope.core.errors import UsageError

Refused = Callable[..., None]
TOKEN = "a-token-of-many-letters"


@pytest.mark.parametrize(
    "path", ["/", "/head/1/2", "/api/state", "/api/nothing", "/static/app.js", "/static/../server.py"]
)
def test_every_answer_has_the_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] in ("no-store", "no-cache") and "access-control-allow-origin" not in headers


def test_the_page_holds_no_code_of_its_own(client: TestClient) -> None:
    text = client.get("/").text
    assert text.count("<script") == 2 and 'type="importmap"' in text and "onload" not in text and "style=" not in text
    assert "http:" not in text and "https:" not in text


def test_only_files_of_the_page_are_served(client: TestClient) -> None:
    script = client.get("/static/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/app.js", headers={"if-none-match": script.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/vendor"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "127.0.0.1", "127.0.0.1:1", "", f"{HOST}.evil.example"]
)
def test_other_names_are_refused(client: TestClient, refused: Refused, host: str) -> None:
    for path in ("/", "/api/state", "/static/app.js"):
        refused(client.get(path, headers={"host": host}), 421, "name")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
def test_other_sites_are_refused(client: TestClient, refused: Refused, origin: str) -> None:
    refused(client.post("/api/jobs", json={"kind": "scan"}, headers={"origin": origin}), 403, "other sites")
    refused(client.get("/api/state", headers={"origin": origin}), 403)
    assert not client.get("/api/jobs").json()["jobs"]


def test_the_page_itself_may_ask(client: TestClient) -> None:
    headers = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert client.get("/api/state", headers=headers).status_code == 200


def test_a_link_from_elsewhere_opens_the_page_but_reads_nothing(client: TestClient, refused: Refused) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/head/1/2", headers=link).status_code == 200
    refused(client.get("/api/state", headers=link), 403)
    refused(client.get("/static/app.js", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}), 403)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken(client: TestClient, refused: Refused, kind: str) -> None:
    refused(client.post("/api/jobs", content='{"kind": "scan"}', headers={"content-type": kind}), 415, "JSON")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_verbs_are_refused(client: TestClient, refused: Refused, method: str) -> None:
    refused(client.request(method, "/api/jobs"), 405)


def test_large_requests_are_refused(client: TestClient, refused: Refused) -> None:
    big = '{"prompt": "' + "a" * MOST_BYTES + '"}'
    json = {"content-type": "application/json"}
    refused(client.post("/api/pattern", content=big, headers=json), 413, "larger")

    def pieces() -> Any:  # without a length told beforehand
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536].encode()

    refused(client.post("/api/pattern", content=pieces(), headers=json), 413, "larger")


class TestToken:
    @pytest.fixture
    def guarded(self, session: Session) -> TestClient:
        return serve(session, hosts=None, token=TOKEN)

    def test_every_address_needs_it(self, guarded: TestClient, refused: Refused) -> None:
        for path in ("/", "/api/state", "/static/app.js", "/api/jobs"):
            refused(guarded.get(path), 401, "token")
            refused(guarded.get(path, headers={"authorization": "Bearer wrong"}), 401)
            refused(guarded.get(path, headers={"cookie": "headscope_token=ümlaut".encode()}), 401)
            refused(guarded.get(f"{path}?token={TOKEN}x"), 401)
            assert guarded.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        refused(guarded.post("/api/jobs", json={"kind": "scan"}), 401)

    def test_the_address_hands_it_over_to_a_cookie(self, guarded: TestClient) -> None:
        first = guarded.get(f"/head/1/2?token={TOKEN}&prompt=a+b%26", follow_redirects=False)
        assert first.status_code == 303 and first.headers["location"] == "/head/1/2?prompt=a+b%26"
        assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=Strict" in first.headers["set-cookie"]
        assert guarded.get("/api/state").status_code == 200

    def test_it_leads_to_no_other_site(self, guarded: TestClient) -> None:
        first = guarded.get(f"//evil.example/?token={TOKEN}", follow_redirects=False)
        assert not first.headers.get("location", "").startswith("//")
        # browsers read \\ as /, and leave tabs out
        for path, place in (("/%5Cevil.example", "/%5Cevil.example"), ("/%09/evil.example", "/%09/evil.example"),
                            ("/%E6%9D%B1", "/%E6%9D%B1"), ("/%0d%0aX:y", "/%0D%0AX%3Ay")):  # fmt: skip
            found = guarded.get(f"{path}?token={TOKEN}", follow_redirects=False)
            assert found.status_code == 303 and found.headers["location"] == place

    def test_foreign_sites_are_refused_with_it_too(self, guarded: TestClient, refused: Refused) -> None:
        headers = {"authorization": f"Bearer {TOKEN}", "origin": "https://evil.example"}
        refused(guarded.post("/api/jobs", json={"kind": "scan"}, headers=headers), 403)


def test_a_server_for_all_names_cannot_be_made_without_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        Guard(lambda *_: None, hosts=None, token=None, policy="")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("host", "near"), [("127.0.0.1", True), ("127.3.2.1", True), ("localhost", True), ("::1", True),
                                            ("0.0.0.0", False), ("::", False), ("192.168.0.5", False), ("example.org", False)])  # fmt: skip
def test_beyond_this_machine_a_token_is_needed(host: str, near: bool) -> None:
    assert is_loopback(host) == near
    check_address(host, TOKEN)
    if near:
        check_address(host, None)
    else:
        with pytest.raises(UsageError, match="--token"):
            check_address(host, None)


@pytest.mark.parametrize("token", ["", "short", "with spaces in it, many", "x" * 300, "semi;colons;semi;colons"])
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="--token takes"):
        check_address("127.0.0.1", token)


def test_the_next_port_is_taken_unless_one_was_asked_for() -> None:
    first = listen("127.0.0.1", None)
    second = listen("127.0.0.1", None)
    ports = [sock.getsockname()[1] for sock in (first, second)]
    try:
        assert ports[1] > ports[0] >= 8642
        with pytest.raises(UsageError, match=f"Port {ports[0]}"):
            listen("127.0.0.1", ports[0])
        with pytest.raises(UsageError, match="not a port"):
            listen("127.0.0.1", 123456)
        assert address(first, "127.0.0.1", None) == f"http://127.0.0.1:{ports[0]}/"
        assert address(first, "::1", TOKEN).endswith(f"/?token={TOKEN}")
        assert f"localhost:{ports[0]}" in (names(first, "127.0.0.1") or ()) and names(first, "0.0.0.0") is None
    finally:
        first.close()
        second.close()


def test_no_browser_is_started_inside_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_screen()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_screen()


def test_the_libraries_are_the_pinned_ones() -> None:
    import importlib.util

    path = Path(__file__).parents[2] / "tools" / "vendor.py"
    spec = importlib.util.spec_from_file_location("vendor", path)
    vendor = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    import sys

    sys.modules["vendor"] = vendor
    try:
        spec.loader.exec_module(vendor)  # type: ignore[union-attr]
        assert vendor.problems() == []
    finally:
        del sys.modules["vendor"]
