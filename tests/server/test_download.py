"""Fetching of images: which hosts are asked, and what slow, large and redirecting ones get."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from k3lib.errors import RequestError
from k3lib.server import download as module
from k3lib.server.download import download, is_public

PLACE = "messages[0].content[0]"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        kind, _, rest = self.path[1:].partition("/")
        with contextlib.suppress(OSError):  # the client may leave
            getattr(self, f"_{kind}")(rest)

    def _answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _bytes(self, rest):
        self._answer(200, {"content-length": rest}, b"x" * int(rest))

    def _endless(self, _):
        self._answer(200, {})
        while True:
            self.wfile.write(b"x" * 65536)

    def _status(self, rest):
        self._answer(int(rest), {"content-length": "0"})

    def _to(self, rest):
        self._answer(302, {"location": rest, "content-length": "0"})

    def _loop(self, rest):
        self._answer(307, {"location": f"/loop/{rest}x", "content-length": "0"})

    def _drip(self, _):
        self._answer(200, {"content-length": "1000"})
        while not self.server.ended.wait(0.05):
            self.wfile.write(b"x")

    def _drip_head(self, _):
        while not self.server.ended.wait(0.05):
            self.wfile.write(b"H")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.ended = [], threading.Event()
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(url, hosts, *, max_bytes=100_000, timeout=5.0, allow_private=True):
    return download(
        url,
        hosts=hosts,
        max_bytes=max_bytes,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        allow_private=allow_private,
        param=PLACE,
    )


def refusal(*args, **options):
    with pytest.raises(RequestError) as caught:
        fetch(*args, **options)
    assert caught.value.param == PLACE
    assert str(caught.value).startswith(f"{PLACE}: cannot fetch ")
    return str(caught.value)


def local(server, path):
    host = f"127.0.0.1:{server.server_port}"
    return f"http://{host}{path}", [host]


def test_fetches_from_a_host_that_is_named(server):
    assert fetch(*local(server, "/bytes/1000")) == b"x" * 1000
    path, headers = server.asked[0]
    assert path == "/bytes/1000"
    assert headers["Host"] == f"127.0.0.1:{server.server_port}"
    assert "Authorization" not in headers
    assert "Cookie" not in headers


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert fetch(*local(server, "/bytes/3")) == b"xxx"


@pytest.mark.parametrize(
    ("url", "hosts", "is_allowed"),
    [
        ("http://example.org/x", ["example.org"], True),
        ("http://EXAMPLE.org./x", ["Example.org"], True),
        ("https://example.org/x", ["example.org"], True),
        ("https://example.org:443/x", ["example.org"], True),
        ("http://example.org:8080/x", ["example.org"], False),
        ("http://example.org:8080/x", ["example.org:8080"], True),
        ("http://example.org/x", ["example.org:8080"], False),
        ("http://a.example.org/x", ["example.org"], False),
        ("http://a.example.org/x", ["*.example.org"], True),
        ("http://b.a.example.org/x", ["other.org", "*.example.org"], True),
        ("http://example.org/x", ["*.example.org"], False),
        ("http://badexample.org/x", ["*.example.org"], False),
        ("http://example.org.evil.com/x", ["example.org"], False),
        ("http://anything.net/x", ["*"], True),
        ("http://anything.net:22/x", ["*"], False),
        ("http://[2001:4860:4860::8888]/x", ["2001:4860:4860::8888"], True),
        ("http://[2001:4860:4860::8888]:81/x", ["[2001:4860:4860::8888]:81"], True),
        ("http://example.org/x", [], False),
    ],
)
def test_only_named_hosts_and_ports_are_asked(monkeypatch, url, hosts, is_allowed):
    def resolve(*_, **__):
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert ("has no address" in refusal(url, hosts)) == is_allowed


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.org/x", "not http or https"),
        ("file:///etc/passwd", "not http or https"),
        ("http:///x", "names no host"),
        ("http://user:secret@example.org/x", "user name"),
        ("http://example.org:99999/x", "ort"),
        ("http://[::1/x", "Invalid IPv6"),
        ("http://exa mple.org/x", "has no address"),
        ("http://" + "a" * 70_000 + "/x", "has no address"),
        ("http://ä\udc80.org/x", ""),
    ],
)
def test_urls_that_are_none_are_refused(url, why):
    assert why in refusal(url, ["*"])


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "169.254.169.254"],
)
def test_private_addresses_are_refused_however_they_are_written(host):
    assert "not at a public address" in refusal(f"http://{host}/x", ["*"], allow_private=False)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("10.0.0.1", False),
        ("172.16.5.5", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:8.8.8.8", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses_are_told_from_others(address, public):
    assert is_public(address) is public


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert "not at a public address" in refusal("http://example.org/x", ["*"], allow_private=False)


def test_the_address_that_was_judged_is_the_one_connected_to(server, monkeypatch):
    resolve, names = socket.getaddrinfo, []

    def once(name, *args, **options):
        names.append(name)
        return resolve("127.0.0.1" if name == "example.org" else name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", once)
    port = server.server_port
    assert fetch(f"http://example.org:{port}/bytes/3", [f"example.org:{port}"]) == b"xxx"
    assert names.count("example.org") == 1
    assert server.asked[0][1]["Host"] == f"example.org:{port}"


def test_redirects_are_followed_under_the_same_rules(server):
    url, hosts = local(server, "/to//bytes/5")
    assert fetch(url, hosts) == b"xxxxx"
    url, hosts = local(server, "/to/http://elsewhere.org/x")
    assert "fetches nothing from 'elsewhere.org'" in refusal(url, hosts)
    url, hosts = local(server, "/to/file:///etc/passwd")
    assert "not http or https" in refusal(url, hosts)
    url, hosts = local(server, "/loop/")
    assert "more than 3 redirects" in refusal(url, hosts)


def test_a_redirect_to_a_private_address_is_refused(server, monkeypatch):
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")
    port = server.server_port
    url, hosts = local(server, f"/to/http://127.0.0.2:{port}/bytes/5")
    assert "not at a public address" in refusal(url, [*hosts, f"127.0.0.2:{port}"], allow_private=False)
    assert len(server.asked) == 1


def test_large_answers_are_cut_off(server):
    assert "it has 100,001 bytes, the limit is 100,000" in refusal(*local(server, "/bytes/100001"))
    assert "more than 100,000 bytes" in refusal(*local(server, "/endless/"))
    assert len(fetch(*local(server, "/bytes/100000"))) == 100_000


@pytest.mark.parametrize("path", ["/drip/", "/drip_head/"])
def test_an_answer_that_trickles_is_cut_off_in_time(server, path):
    started = time.monotonic()
    assert "took longer than 0.4 s" in refusal(*local(server, path), timeout=0.4)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("status", [204, 404, 500])
def test_other_answers_are_refused(server, status):
    assert f"its host answered {status}" in refusal(*local(server, f"/status/{status}"))


def test_a_closed_port_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert "refused" in refusal(f"http://127.0.0.1:{port}/x", [f"127.0.0.1:{port}"])


@pytest.fixture
def secure_server(server, tmp_path):
    """The server behind TLS, with a certificate of its own for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key, "-out", cert]
    subprocess.run([openssl, *make, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.cert = cert
    return server


def test_certificates_are_checked_for_the_name_in_the_url(secure_server, monkeypatch):
    port = secure_server.server_port
    hosts = [f"localhost:{port}", f"127.0.0.1:{port}"]
    assert "certificate verify failed" in refusal(f"https://localhost:{port}/bytes/3", hosts)
    monkeypatch.setenv("SSL_CERT_FILE", str(secure_server.cert))
    assert fetch(f"https://localhost:{port}/bytes/3", hosts) == b"xxx"
    assert "took longer than 0.4 s" in refusal(f"https://localhost:{port}/drip/", hosts, timeout=0.4)
    assert "IP address mismatch" in refusal(f"https://127.0.0.1:{port}/bytes/3", hosts)
