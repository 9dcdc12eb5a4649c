"""Who gets in: TLS, client certificates, bearer tokens, loopback, the admin service."""

import asyncio
import hmac
import pathlib
import shutil
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from engine.serving import admin, exposure, interceptors
from engine.serving.client import AsyncClient, Client
from engine.serving.grpc_server import SERVICE, ServerSettings
from proto.treadle.v1 import admin_pb2, admin_pb2_grpc
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving import certificates
from tests.serving.fake_core import FakeCore
from tests.serving.running_server import RunningServer, running

_SECONDS = 20.0
_TOKENS = ("first-token-of-two-0123456789", "second-token-of-two-9876543210")
_SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return certificates.authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return certificates.authority(tmp_path_factory.mktemp("tls"), "others")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"# of two teams\n{_TOKENS[0]}\n\n{_TOKENS[1]}\n", encoding="utf-8")
    return path


def _info(channel, token=None):
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    stub = pb_grpc.GenerationServiceStub(channel)
    return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_SECONDS, metadata=metadata)


def _secure(server, ca, cert=None, key=None):
    pair = (None, None) if cert is None else (key.read_bytes(), cert.read_bytes())
    return grpc.secure_channel(server.address, grpc.ssl_channel_credentials(ca.read_bytes(), *pair))


def _code(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code()


def test_tls_server_answers_who_trusts_it_and_nobody_in_clear_text(files, others):
    with running(tls_cert=files.cert, tls_key=files.key) as server:
        with _secure(server, files.ca) as channel:
            assert _info(channel).device == "cpu"
        with _secure(server, others.ca) as channel:
            assert _code(_info, channel) == grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(server.address) as channel:
            assert _code(_info, channel) == grpc.StatusCode.UNAVAILABLE


def test_python_clients_show_token_and_certificate(files, token_file):
    settings = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    params = {"max_tokens": 3, "temperature": 0.0}
    tls = grpc.ssl_channel_credentials(files.ca.read_bytes(), *pair)

    async def ask(address):
        async with AsyncClient(address, timeout=_SECONDS, token=_TOKENS[1], tls=tls) as client:
            return (await client.generate([1], params)).outputs[0].token_ids

    with running(token_file=token_file, **settings) as server:
        with Client(server.address, timeout=_SECONDS, token=_TOKENS[0], tls=tls) as client:
            found = client.generate([1], params).outputs[0].token_ids
            assert len(found) == 3
        assert asyncio.run(ask(server.address)) == found
        with (
            Client(server.address, timeout=_SECONDS, tls=tls) as client,
            pytest.raises(PermissionError),
        ):
            client.info()


def test_mutual_tls_lets_in_clients_of_its_authority_alone(files, others):
    settings = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    with running(**settings) as server:
        with _secure(server, files.ca, files.cert, files.key) as channel:
            assert _info(channel).device == "cpu"
        with _secure(server, files.ca) as channel:
            assert _code(_info, channel) == grpc.StatusCode.UNAVAILABLE
        with _secure(server, files.ca, others.cert, others.key) as channel:
            assert _code(_info, channel) == grpc.StatusCode.UNAVAILABLE


def test_tls_files_that_do_not_suit_are_named(files, others, tmp_path):
    with pytest.raises(ValueError, match=r"are no pair of PEM certificate and unencrypted key"):
        exposure.credentials(files.cert, others.key, None)
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no PEM certificate; give the authority"):
        exposure.credentials(files.cert, files.key, empty)
    with pytest.raises(FileNotFoundError):
        exposure.credentials(tmp_path / "none.pem", files.key, None)


def _methods():
    """Every unary or server-streaming method that a server with all its services has."""
    for descriptor in (pb.DESCRIPTOR, admin_pb2.DESCRIPTOR):
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method.server_streaming


def _call(channel, method, is_stream, metadata):
    if is_stream:
        return list(channel.unary_stream(method)(b"", timeout=_SECONDS, metadata=metadata))
    return channel.unary_unary(method)(b"", timeout=_SECONDS, metadata=metadata)


def _status_of(*arguments):
    try:
        _call(*arguments)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def guarded(token_file):
    with (
        running(token_file=token_file, admin=True) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield channel


def _reflect(channel, metadata=()):
    call = channel.stream_stream(
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = call(iter((request,)), timeout=_SECONDS, metadata=metadata)
    return {service.name for service in answer.list_services_response.service}


def test_every_method_of_every_service_needs_a_token(guarded):
    methods = dict(_methods())
    assert len(methods) >= 9
    for method, is_stream in methods.items():
        for metadata in (
            (),
            (("authorization", "Bearer wrong-token-0123456789"),),
            (("authorization", f"Basic {_TOKENS[0]}"),),
            (("authorization", _TOKENS[0]),),
            (("authorization", f"Bearer {_TOKENS[0]}x"),),
        ):
            found = _status_of(guarded, method, is_stream, metadata)
            assert found == grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
        for token in _TOKENS:
            metadata = (("authorization", f"Bearer {token}"),)
            found = _status_of(guarded, method, is_stream, metadata)
            assert found in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), method


def test_every_method_of_the_gateways_service_needs_a_token(guarded):
    (service,) = vllm_engine_pb2.DESCRIPTOR.services_by_name.values()
    assert len(service.methods) >= 9
    for method in service.methods:
        name = f"/{service.full_name}/{method.name}"
        for metadata in ((), (("authorization", f"Bearer {_TOKENS[0]}x"),)):
            found = _status_of(guarded, name, method.server_streaming, metadata)
            assert found == grpc.StatusCode.UNAUTHENTICATED, (name, metadata)
    metadata = (("authorization", f"Bearer {_TOKENS[0]}"),)
    for name in ("HealthCheck", "GetServerInfo", "FlushCache"):
        found = _status_of(guarded, f"/{service.full_name}/{name}", False, metadata)
        assert found == grpc.StatusCode.OK, name


def test_python_client_without_a_known_token_is_told_how_to_give_one(token_file):
    with running(token_file=token_file) as server:
        for token in (None, "wrong-token-0123456789"):
            with (
                Client(server.address, timeout=_SECONDS, token=token) as client,
                pytest.raises(PermissionError, match=r"Client\(token=...\)"),
            ):
                client.info()
        with Client(server.address, timeout=_SECONDS, token=_TOKENS[0] + "\n") as client:
            assert client.info()
        with pytest.raises(ValueError, match="one word of printable ASCII"):
            Client(server.address, token="two words")


def test_reflection_needs_a_token_and_names_every_service(guarded):
    assert _code(_reflect, guarded) == grpc.StatusCode.UNAUTHENTICATED
    names = _reflect(guarded, (("authorization", f"bearer {_TOKENS[1]}"),))
    assert {SERVICE, admin.SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME} <= names


def test_health_needs_no_token(guarded):
    stub = health_pb2_grpc.HealthStub(guarded)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    assert stub.Check(request, timeout=_SECONDS).status == _SERVING
    assert next(stub.Watch(request, timeout=_SECONDS)).status == _SERVING


def test_a_refused_call_says_what_to_send_and_is_not_parsed(guarded):
    call = guarded.unary_stream(f"/{SERVICE}/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff", timeout=_SECONDS))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == (
        "the call has no valid token; send the metadata `authorization: Bearer TOKEN`"
    )


def test_all_tokens_are_compared_in_constant_time_whichever_is_right(monkeypatch):
    compared = []
    compare = hmac.compare_digest

    def counting(one, other):
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(interceptors.hmac, "compare_digest", counting)
    tokens = interceptors.Tokens(_TOKENS)
    assert tokens._holds(f"Bearer {_TOKENS[0]}") and tokens._holds(f"Bearer {_TOKENS[1]}")
    assert not tokens._holds("Bearer x")
    assert compared == [(32, 32)] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token; write one a line"),
        ("# only a word\n\n", "holds no token"),
        ("short\n", "token 1 of .* has 5 characters, it must have at least 16"),
        (f"{_TOKENS[0]}\nwith a space inside it\n", "token 2 of .* holds a space"),
        ("höchst-geheimes-wort-123\n", "a character that is not ASCII"),
    ],
)
def test_token_files_that_do_not_suit_are_refused(tmp_path, text, message):
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        interceptors.read_tokens(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "example.org"])
def test_host_that_others_reach_needs_tls_or_a_token_or_a_word(host):
    def check(**given):
        wanted = {"has_tls": False, "has_tokens": False, "is_insecure": False} | given
        return exposure.check_host(host, **wanted)

    with pytest.raises(ValueError, match=r"without TLS or a token; give --tls-cert"):
        check()
    assert "open to every machine" in check(is_insecure=True)
    assert "clear text" in check(has_tokens=True)
    assert check(has_tls=True) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]", "::1"])
def test_loopback_needs_nothing(host):
    nothing = {"has_tls": False, "has_tokens": False, "is_insecure": False}
    assert exposure.check_host(host, **nothing) is None


def test_open_host_is_refused_before_anything_is_loaded():
    core = FakeCore()
    server = RunningServer(core, host="0.0.0.0").start("never said")
    server.join()
    assert isinstance(server.failure, ValueError) and not server.lines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_cert": "c"}, "tls_cert and tls_key belong together"),
        ({"tls_client_ca": "c"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"profile_dir": "d"}, "profile_dir is for the admin service; turn that on with admin"),
        ({"request_seconds": 0.0}, r"request_seconds is 0.0, it must lie in \(0, 86400\]"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    paths = {
        name: pathlib.Path(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=message):
        ServerSettings(**paths)


# The admin service.


def test_admin_service_is_off_by_default():
    with running() as server, grpc.insecure_channel(server.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.FlushPrefixCacheRequest()
        assert _code(stub.FlushPrefixCache, request, timeout=_SECONDS) == (
            grpc.StatusCode.UNIMPLEMENTED
        )
        assert admin.SERVICE not in _reflect(channel)


def test_admin_flushes_the_prefix_cache_on_the_engines_thread():
    core = FakeCore()
    flushed = []
    core.reset_prefix_cache = lambda: flushed.append(True)
    with running(core, admin=True) as server, grpc.insecure_channel(server.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        stub.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=_SECONDS)
    assert flushed == [True]


def test_admin_profile_records_into_its_own_folder_and_one_at_a_time(tmp_path, monkeypatch):
    calls = []

    class Profiler:
        @staticmethod
        def start_trace(folder):
            calls.append(("start", pathlib.Path(folder).parent))

        @staticmethod
        def stop_trace():
            calls.append(("stop", None))

    monkeypatch.setattr(admin, "_profiler", lambda: Profiler)
    monkeypatch.setattr(admin, "_MIN_SECONDS", 0.0)
    with (
        running(admin=True, profile_dir=tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        first = stub.Profile.future(admin_pb2.ProfileRequest(seconds=0.5), timeout=_SECONDS)
        while not calls:
            time.sleep(0.01)
        second = admin_pb2.ProfileRequest(seconds=0.1)
        assert _code(stub.Profile, second, timeout=_SECONDS) == grpc.StatusCode.ABORTED
        assert len(first.result().name) == 15
        too_long = admin_pb2.ProfileRequest(seconds=61.0)
        assert _code(stub.Profile, too_long, timeout=_SECONDS) == (grpc.StatusCode.INVALID_ARGUMENT)
    assert calls == [("start", tmp_path), ("stop", None)]


def test_admin_profile_without_a_folder_says_so():
    with running(admin=True) as server, grpc.insecure_channel(server.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.ProfileRequest(seconds=1.0)
        assert _code(stub.Profile, request, timeout=_SECONDS) == (
            grpc.StatusCode.FAILED_PRECONDITION
        )
