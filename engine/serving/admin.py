"""The calls of the admin service: what an operator does to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from proto.treadle.v1 import admin_pb2 as pb
from proto.treadle.v1 import admin_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from engine.serving.llm import AsyncLLM

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name

_MIN_SECONDS, _MAX_SECONDS = 1.0, 60.0

Lend = Callable[[grpc.aio.ServicerContext], contextlib.AbstractAsyncContextManager["AsyncLLM"]]
"""Lends the engine to one call and words what goes wrong in it as a status."""


class AdminService(pb_grpc.AdminServiceServicer):
    """The calls of admin.proto.

    Args:
      lend: lends the engine.
      profile_dir: gets one folder for each recording; None: there are none.
    """

    def __init__(self, lend: Lend, profile_dir: pathlib.Path | None) -> None:
        self._lend = lend
        self._profile_dir = profile_dir
        self._profiling = asyncio.Lock()

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        """Forgets every cached prefix."""
        async with self._lend(context) as llm:
            await llm.reset_prefix_cache()
        return pb.FlushPrefixCacheResponse()

    async def Profile(
        self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.ProfileResponse:
        """Records for some seconds; the engine serves meanwhile."""
        async with self._lend(context):
            if not _MIN_SECONDS <= request.seconds <= _MAX_SECONDS:
                raise ValueError(
                    f"seconds is {request.seconds}, it must lie in "
                    f"[{_MIN_SECONDS:g}, {_MAX_SECONDS:g}]"
                )
            if self._profile_dir is None:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "the server has no folder for recordings; start it with --profile-dir",
                )
            if self._profiling.locked():
                await context.abort(
                    grpc.StatusCode.ABORTED, "another recording runs; wait for its end"
                )
            name = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            async with self._profiling, _recording(self._profile_dir / name):
                await asyncio.sleep(request.seconds)
        return pb.ProfileResponse(name=name)


@contextlib.asynccontextmanager
async def _recording(folder: pathlib.Path) -> AsyncIterator[None]:
    """JAX's own profiler writes into `folder` while inside."""
    profiler = await asyncio.to_thread(_profiler)
    await asyncio.to_thread(profiler.start_trace, str(folder))
    try:
        yield
    finally:
        await asyncio.shield(asyncio.to_thread(profiler.stop_trace))


def _profiler() -> Any:
    # The engine has imported jax by now; this module is read without it.
    import jax.profiler

    return jax.profiler
