"""Many pages that follow one run: `python watchers.py PORT NUMBER RUN`. Ends when told so, and says what came."""

from __future__ import annotations

import asyncio
import os
import sys


async def follow(port: int, run: str, counts: list[int], number: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /api/events?id={run}&have=0 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    while piece := await reader.read(1 << 20):
        counts[number] += piece.count(b"event: more")


async def main(port: int, number: int, run: str) -> None:
    counts = [0] * number
    following = [asyncio.create_task(follow(port, run, counts, i)) for i in range(number)]
    while not all(counts):
        await asyncio.sleep(0.05)
    sys.stdout.write("all follow\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    gone = sum(task.done() for task in following)
    sys.stdout.write(f"{min(counts)} {max(counts)} {gone}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    os.nice(19)  # who watches is somewhere else
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
