"""Each way to miss a server's TLS, through each of our own clients, is told in one line."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import shutil
import socket
import ssl
import threading
import urllib.error
import urllib.request

import grpc
import pytest

from engine.serving import cli, top, unreached
from engine.serving.client import AsyncClient, Client, Unavailable
from tests.serving import certificates
from tests.serving.running_server import running

_SECONDS = 20.0

# What the server wants, what the caller brings, what is said. `ours` and `others` are authorities.
_PLAIN = "cannot be reached in plain text: "
_TLS = "cannot be reached over TLS: "
_CASES = {
    "plain text to TLS": (
        {"tls": "ours"},
        {},
        _PLAIN + "it closed the connection before the first call; it may speak TLS: ",
        "to_tls",
    ),
    "plain text to mTLS": (
        {"tls": "ours", "mtls": "ours"},
        {},
        _PLAIN + "it closed the connection before the first call; it may speak TLS: ",
        "to_tls",
    ),
    "TLS to plain text": (
        {},
        {"ca": "ours"},
        _TLS + "its answer is no TLS; it may speak plain text: ",
        "to_plain",
    ),
    "wrong authority": (
        {"tls": "ours"},
        {"ca": "others"},
        _TLS + "its certificate is not of the given authority: ",
        "to_authority",
    ),
    "no client certificate": (
        {"tls": "ours", "mtls": "ours"},
        {"ca": "ours"},
        _TLS + "it closed the connection before the first call; it may want a client certificate "
        "of an authority of its own: ",
        "to_certificate",
    ),
    "client certificate of others": (
        {"tls": "ours", "mtls": "ours"},
        {"ca": "ours", "show": "others"},
        _TLS + "it closed the connection before the first call; it may want a client certificate "
        "of an authority of its own: ",
        "to_certificate",
    ),
}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return {
        name: certificates.authority(tmp_path_factory.mktemp("tls"), name)
        for name in ("ours", "others")
    }


@pytest.fixture(params=_CASES)
def case(request, authorities):
    """A server, what its caller brings, and what the caller is told, up to the way out."""
    wants, brings, words, way = _CASES[request.param]
    settings = {}
    if "tls" in wants:
        files = authorities[wants["tls"]]
        settings |= {"tls_cert": files.cert, "tls_key": files.key}
    if "mtls" in wants:
        settings["tls_client_ca"] = authorities[wants["mtls"]].ca
    with running(**settings) as server:
        yield server, {key: authorities[name] for key, name in brings.items()}, words, way


def credentials(brings):
    if "ca" not in brings:
        return None
    shown = brings.get("show")
    pair = () if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
    return grpc.ssl_channel_credentials(brings["ca"].ca.read_bytes(), *pair)


def test_python_client_says_what_was_tried_what_happened_and_the_way_out(case):
    server, brings, words, way = case
    expected = f"{server.address} {words}{getattr(unreached.PYTHON, way)}"
    tls = credentials(brings)

    async def ask():
        async with AsyncClient(server.address, timeout=_SECONDS, tls=tls) as client:
            await client.info()

    with Client(server.address, timeout=_SECONDS, tls=tls) as client:
        for call in (client.info, lambda: client.generate("a"), lambda: next(client.stream("a"))):
            with pytest.raises(Unavailable) as caught:
                call()
            assert str(caught.value) == expected
        with pytest.raises(TimeoutError) as late:
            client.wait_ready(0.0)
        assert str(late.value) == f"the server is not ready after 0.0 s: {expected}"
    with pytest.raises(Unavailable) as caught:
        asyncio.run(ask())
    assert str(caught.value) == expected


def test_bench_serve_says_it_in_one_line_with_its_own_options(case, capsys):
    server, brings, words, way = case
    options = ["--tls-ca", brings["ca"].ca] if "ca" in brings else []
    if "show" in brings:
        options += ["--tls-cert", brings["show"].cert, "--tls-key", brings["show"].key]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", server.address, *map(str, options)])
    assert ended.value.code == 1
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("error: "))
    assert line == f"error: {server.address} {words}{getattr(unreached.COMMAND, way)}"


def test_certificate_of_another_name_is_said_to_be(authorities, tmp_path):
    elsewhere = certificates.authority(tmp_path, "elsewhere", names="DNS:elsewhere")
    with running(tls_cert=elsewhere.cert, tls_key=elsewhere.key) as server:
        tls = grpc.ssl_channel_credentials(elsewhere.ca.read_bytes())
        with (
            Client(server.address, timeout=_SECONDS, tls=tls) as client,
            pytest.raises(Unavailable, match=r"its certificate is of another name; call it by"),
        ):
            client.info()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "127.0.0.1:1 cannot be reached in plain text: nothing listens there; "),
        ("no.such.invalid:1", "no.such.invalid:1 cannot be reached in plain text: the name is not"),
    ],
)
def test_nobody_there_is_not_taken_for_a_matter_of_tls(address, words):
    with Client(address, timeout=_SECONDS) as client, pytest.raises(Unavailable) as caught:
        client.info()
    assert str(caught.value).startswith(words)
    assert "TLS" not in str(caught.value)


def test_what_a_server_itself_says_is_left_as_it_is():
    assert not unreached.is_unreached("the server is draining and takes no new requests")
    assert not unreached.is_unreached("Socket closed")


def test_other_protocol_on_the_port_is_told_in_grpcs_own_words():
    detail = "failed to connect to all addresses; last error: INTERNAL: Failed parsing HTTP/2"
    found = unreached.described(detail, "a:1", is_tls=False, ways=unreached.COMMAND)
    assert found == (
        "a:1 cannot be reached in plain text: INTERNAL: Failed parsing HTTP/2; check that this is "
        "its gRPC port"
    )


def test_bench_serve_shows_its_certificate_to_a_server_that_wants_one(authorities):
    ours = authorities["ours"]
    words = ["--requests", "2", "--prompt-len", "3", "--output-len", "2", "--tls-ca", ours.ca]
    words += ["--tls-cert", ours.cert, "--tls-key", ours.key]
    settings = {"tls_cert": ours.cert, "tls_key": ours.key, "tls_client_ca": ours.ca}
    with running(**settings) as server, pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", server.address, *map(str, words)])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-cert", "c"], "--tls-cert and --tls-key belong together; give both or none"),
        (["--tls-cert", "c", "--tls-key", "k"], "--tls-cert needs --tls-ca, which turns TLS on"),
        (["--tls-ca", "/no/such"], "No such file or directory: /no/such"),
    ],
)
def test_bench_serve_wants_tls_files_that_belong_together(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", "127.0.0.1:1", *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# `treadle top`, which reads metrics over HTTP.


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@contextlib.contextmanager
def page(files=None, client_ca=None):
    """An HTTP server's port; over TLS where it has files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    server.handle_error = lambda *failed: None
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("scheme", "has_tls", "wants_certificate", "trusts", "happened", "way"),
    [
        ("http", True, False, "ours", "it may speak TLS or gRPC|is not HTTP", "--metrics-port and"),
        ("https", False, False, "ours", "its answer is no TLS: ", "write http://"),
        ("https", True, False, "others", "its certificate was not accepted: ", "plain http://"),
        ("https", True, True, "ours", "it may want a client certificate, which is not", "plain"),
    ],
    ids=["plain text to TLS", "TLS to plain text", "wrong authority", "no client certificate"],
)
def test_top_says_what_is_wrong_with_tls(
    authorities, monkeypatch, scheme, has_tls, wants_certificate, trusts, happened, way
):
    ours = authorities["ours"]
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities[trusts].ca))
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the authorities it read first
    files, client_ca = (ours if has_tls else None), (ours.ca if wants_certificate else None)
    with page(files, client_ca) as port:
        url = f"{scheme}://127.0.0.1:{port}/metrics"
        with pytest.raises(OSError, match=f"no metrics at {url} .*({happened}).*; .*{way}"):
            top.read(url)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_top_says_where_nothing_listens(scheme):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it listens to nobody
        url = f"{scheme}://127.0.0.1:{taken.getsockname()[1]}/metrics"
        with pytest.raises(OSError, match=r"Connection refused.*; start the server with --metric"):
            top.read(url)


def test_top_says_when_a_connection_ends_within_tls(monkeypatch):
    def urlopen(url, timeout):
        raise urllib.error.URLError(ssl.SSLError("broken"))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    match = "it ended TLS: it closed the connection; it may want a client certificate"
    with pytest.raises(OSError, match=match):
        top.read("https://127.0.0.1:1/metrics")
