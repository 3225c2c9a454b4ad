"""What a second replica costs a put: the same pages put into two members of a cluster with one owner for each page, and
with two.

    python benchmarks/replicas.py
    python benchmarks/repeat.py 3 benchmarks/replicas.py

Three clusters of two processes take turns: R=1; R=2, where a put is answered when the first owner has the pages; and
R=2 with ack=all. Beside the time of the puts: until the last page is at all its owners, and CPU seconds of clients and
nodes.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from batch import Batch, Batches
from measure import Report, Samples, median, progress, rounds

from kvstore import Client, ClientConfig, Keep, PutOutcome
from kvstore.pb import kvstore_pb2 as pb

MEMBERS = 2
# A member in a process of its own, which is told of the others when all have their ports.
CODE = """
import sys
from kvstore.cluster.view import Member, View
from node.config import NodeConfig
from node.server import Node

number, replicas = int(sys.argv[1]), int(sys.argv[2])
node = Node(NodeConfig(host="127.0.0.1", port=0, bulk_port=0, metrics_port=0, shm_socket="none", ram_nbytes=512 << 20))
node.start()
print(node.grpc.port, flush=True)
members = tuple(Member(f"n{i}", f"127.0.0.1:{port}") for i, port in enumerate(sys.stdin.readline().split()))
node.membership.become(View("fleet", 1, members, replicas), f"n{number}")
print("ready", flush=True)
sys.stdin.readline()
node.stop()
"""


class Fleet:
    """Members in processes of their own, and a client of them."""

    def __init__(self, replicas: int, keep: Keep) -> None:
        self.keep = keep
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", CODE, str(number), str(replicas)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(MEMBERS)
        ]
        ports = [self._line(process) for process in self._processes]
        for process in self._processes:
            self._say(process, " ".join(ports))
            self._line(process)
        self.client = Client(ClientConfig(address=f"127.0.0.1:{ports[0]}", wire="bulk", timeout_s=30.0))

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    @staticmethod
    def _say(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def cpu_s(self) -> float:
        """Of this process and the members."""
        ticks = sum(_ticks(process.pid) for process in self._processes)
        return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()

    def settle(self) -> None:
        """Until nothing waits to be handed on."""
        while any(status.peers.queue_pages for status in self._statuses()):
            time.sleep(0.005)

    def dropped(self) -> int:
        return sum(status.peers.pages_dropped for status in self._statuses())

    def _statuses(self) -> Iterator[pb.NodeStatusReply]:
        for status in self.client.statuses().values():
            assert isinstance(status, pb.NodeStatusReply)
            yield status

    def turn(self, batch: Batch) -> Samples:
        """One put of the batch's pages, none of which is there."""
        self.client.remove(batch.namespace, batch.hashes)
        cpu, began = self.cpu_s(), time.perf_counter()
        outcomes = self.client.put(batch.namespace, batch.hashes, batch.pages, self.keep)
        put = time.perf_counter() - began
        assert set(outcomes) == {PutOutcome.STORED}
        self.settle()
        return {"put": [put], "all": [time.perf_counter() - began], "cpu": [self.cpu_s() - cpu]}

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        for process in self._processes:
            self._say(process, "end")
        for process in self._processes:
            process.wait(20.0)


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20, help="puts of each contender")
    options.add_argument("--pages", type=int, default=16, help="pages of one put")
    options.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    chosen = options.parse_args()
    title = f"Put of {chosen.pages} pages into two members, medians of {chosen.rounds} calls"
    report = Report(title, "python benchmarks/replicas.py")
    with Fleet(1, Keep()) as one, Fleet(2, Keep()) as two, Fleet(2, Keep(ack="all")) as acknowledged:
        fleets = {"R=1": one, "R=2": two, "R=2, ack=all": acknowledged}
        for page_nbytes in (1 << 20, 4 << 20):
            batches = Batches(page_nbytes, chosen.pages)
            turns = {name: batches.cycle() for name in fleets}
            contenders = {
                name: (lambda fleet=fleet, turn=turns[name]: fleet.turn(next(turn))) for name, fleet in fleets.items()
            }
            with progress(chosen.rounds + 2) as tick:
                samples = rounds(contenders, chosen.rounds, 2, tick)
            for name, found in samples.items():
                report.rows.append(
                    {
                        "page KiB": page_nbytes >> 10,
                        "cluster": name,
                        "put GB/s": batches.nbytes / median(found["put"]) / 1e9,
                        "put of R=1": median(samples["R=1"]["put"]) / median(found["put"]),
                        "at all owners GB/s": batches.nbytes / median(found["all"]) / 1e9,
                        "CPU s/GB": 1e9 * sum(found["cpu"]) / len(found["cpu"]) / batches.nbytes,
                    }
                )
            for fleet in fleets.values():
                batches.forget(fleet.client)
        dropped = sum(fleet.dropped() for fleet in fleets.values())
        report.notes.append(f"{dropped} pages were dropped on their way to the second owner")
    report.show(chosen.json)


if __name__ == "__main__":
    main()
