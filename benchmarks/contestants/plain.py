"""The plain PyTorch loop: no framework. With --processes 2, the same loop in two processes of one thread."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from plain_torch import WORKS, Weights, Work, as_tensors, cnn, copied, loss_of, mean, train
from work import BATCH, Report, pictures, rounds_wanted

EVALUATED = 1000  # pictures a client
MODELS = WORKS | {"evaluation": Work(cnn, lambda: pictures(samples=EVALUATED), BATCH)}


class Loop:
    def __init__(self, work: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        build, data, self.batch = MODELS[work]
        self.arrays = data()
        self.clients = [as_tensors(client) for client in self.arrays]
        self.model = build()

    def client(self, i: int, weights: Weights) -> Weights:
        self.model.load_state_dict(weights)
        train(self.model, *self.clients[i], batch=self.batch)
        return copied(self.model)

    @torch.no_grad()
    def evaluate(self) -> int:
        self.model.eval()
        hits = 0
        for x, y in self.clients:
            for rows in torch.arange(len(y)).split(100):
                hits += int((self.model(x[rows]).argmax(-1) == y[rows]).sum())
        return hits


_here: Loop  # in a process of the pool


def _begin(work: str) -> None:
    global _here
    _here = Loop(work, threads=1)


def _client(i: int, weights: Weights) -> Weights:
    found = _here.client(i, {name: torch.from_numpy(value) for name, value in weights.items()})
    return {name: value.numpy() for name, value in found.items()}


def main() -> None:
    parser, parse = rounds_wanted()
    parser.add_argument("--work", choices=MODELS, default="cnn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    options = parse()
    loop = Loop(options.work, options.threads)
    name = f"plain PyTorch loop, {options.threads} thread{'s' * (options.threads > 1)}"
    if options.processes > 1:
        name = f"plain PyTorch loop, {options.processes} processes"
    report = Report(name, ("torch",), options.rounds, sum(p.numel() for p in loop.model.parameters()))
    everyone = range(len(loop.clients))

    def alone() -> None:
        weights = copied(loop.model)
        loop.model.load_state_dict(mean([loop.client(i, weights) for i in everyone]))

    if options.work == "evaluation":
        report.play(loop.evaluate)
    elif options.processes == 1:
        report.play(alone)
    else:
        # Arrays, not tensors: torch would pass those through files.
        with ProcessPoolExecutor(options.processes, get_context("spawn"), _begin, (options.work,)) as pool:

            def shared() -> None:
                weights = {name: value.numpy() for name, value in loop.model.state_dict().items()}
                found = pool.map(_client, everyone, [weights] * len(loop.clients))
                loop.model.load_state_dict(
                    mean([{name: torch.from_numpy(value) for name, value in one.items()} for one in found])
                )

            report.play(shared)
    report.end(loss_of(loop.model, loop.arrays[0]))


if __name__ == "__main__":
    main()
