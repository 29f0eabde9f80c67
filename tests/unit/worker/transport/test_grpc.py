"""What the gRPC transport does on the wire."""

import asyncio

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from worker.transport import Stream, TransportError
from worker.transport.grpc import GrpcTransport


def test_a_data_connection_opens_before_there_is_anything_to_send() -> None:
    async def scenario() -> bytes:
        greeted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            greeted.set_result(await reader.readexactly(14))
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        transport = GrpcTransport("127.0.0.1:0")
        try:
            transport.connect(f"{host}:{port}")
            async with asyncio.timeout(30):
                return await greeted
        finally:
            await transport.close()
            server.close()

    assert asyncio.run(scenario()) == b"PRI * HTTP/2.0"


class Ends:
    """Ends every stream at once."""

    async def on_call(self, method: str, request: bytes, caller: str) -> bytes:
        return b""

    async def on_stream(self, method: str, stream: Stream) -> None:
        return None


def test_to_send_on_a_stream_that_has_ended_meanwhile_is_a_broken_stream() -> None:
    """Not a failure of the sender's, which may be writing while another reads the end."""

    async def scenario() -> None:
        server, client = GrpcTransport("127.0.0.1:0"), GrpcTransport("127.0.0.1:0")
        try:
            stream = client.open(await server.listen(Ends()), "Data/PairRound")
            assert await stream.receive() is None
            with pytest.raises(TransportError):
                await stream.send(b"late")
        finally:
            await client.close()
            await server.close()

    asyncio.run(scenario())


def test_probes_learn_that_it_serves() -> None:
    async def scenario() -> int:
        transport = GrpcTransport("127.0.0.1:0")
        address = await transport.listen(Ends())
        try:
            async with aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
        finally:
            await transport.close()

    assert asyncio.run(scenario()) == health_pb2.HealthCheckResponse.SERVING
