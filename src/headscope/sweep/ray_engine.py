"""The same chunks as Ray tasks: one model a worker, the same values as on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headscope.core.errors import HeadscopeError
from headscope.sweep.job import Job
from headscope.sweep.plan import Chunk


def run_chunks(job: Job, chunks: list[tuple[int, Chunk]], n_workers: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """(number, values) of every chunk as it is done. Uses the cluster that is running (`ray.init` or RAY_ADDRESS), else
    starts one on this machine. A worker that dies is started again and its chunk run again.

    Raises HeadscopeError where Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise HeadscopeError("The engine ray needs Ray; install it with: pip install 'headscope[ray]'") from None
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        n_workers = max(1, min(n_workers or cpus, len(chunks)))
        threads = torch.get_num_threads()
        kind = ray.remote(num_cpus=1, max_restarts=3, max_task_retries=3)(_Worker)
        shared = ray.put(job)
        workers = [kind.remote(shared, threads) for _ in range(n_workers)]
        waiting = list(reversed(chunks))
        running: dict[Any, tuple[int, Any]] = {}

        def give(worker: Any) -> None:
            number, chunk = waiting.pop()
            running[worker.run.remote(chunk)] = (number, worker)

        for worker in workers:
            give(worker)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            number, worker = running.pop(done)
            values = torch.from_numpy(ray.get(done).copy())
            if waiting:
                give(worker)
            yield number, values
    finally:
        if started:
            ray.shutdown()


class _Worker:
    """Holds the model and its clean pass in a process of its own."""

    def __init__(self, job: Job, threads: int) -> None:
        # as many as in the local run: the order in which a sum is taken must not depend on the engine
        torch.set_num_threads(threads)
        self.job = job

    def run(self, chunk: Chunk) -> Any:
        return self.job.run(chunk).numpy()
