"""What the gRPC transport does on the wire."""

import asyncio

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
