"""Numbers for Prometheus. Every app has a registry of its own."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3lib.server.answers import Answer

__all__ = ["Metrics"]

_LABEL = "model_name"
_WINDOW = 10.0  # seconds that the throughput looks back

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
_WHOLE = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600, 3200)

_GAUGES = {
    "num_running_reqs": "Requests with memory.",
    "num_queue_reqs": "Requests that wait for memory.",
    "token_usage": "The larger one of both pools' use, 0 to 1.",
    "full_token_usage": "Part of the KV pages that running requests hold.",
    "mamba_usage": "Part of the state slots that running requests hold.",
    "max_total_num_tokens": "Tokens that the KV pool holds.",
    "cache_hit_rate": "Part of all prompt tokens that were not computed.",
    "gen_throughput": "Generated tokens a second, over the last ten seconds.",
    "num_retracted_reqs": "Times that a running request lost its memory and was computed anew.",
}
_SPEC_GAUGES = {
    "spec_accept_length": "Tokens that a verify step gave to a request on average.",
    "spec_accept_rate": "Part of the verified draft tokens that was accepted.",
    "spec_cap_length": "Tokens that a verify step could have given to a request on average: its draft and one more.",
    "spec_num_draft_tokens": "Draft tokens that were verified.",
    "spec_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_num_verify_steps": "Verify steps, counted for each request.",
    "spec_simulated": "1: acceptance is made up to measure speed.",
}
_COUNTERS = {
    "num_requests": "Answers that were begun.",
    "num_aborted_requests": "Answers that ended early: client gone, aborted, out of time, or failed.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "cached_tokens": "Prompt tokens that were not computed.",
    "cached_kv_tokens": "Prompt tokens whose KV was found.",
    "cached_state_tokens": "Prompt tokens whose recurrent state was found, and so were reused.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request to its first token.", _FIRST),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", _SHORT),
    "e2e_request_latency_seconds": ("From the request to its end.", _WHOLE),
}


class _Clock:
    """Times of an answer, and what of it was counted."""

    __slots__ = ("last", "started", "tokens")

    def __init__(self, now: float) -> None:
        self.started = now
        self.last: float | None = None
        self.tokens = 0


class Metrics:
    """Counts answers, their tokens and their times; `engine_state` adds what only the engine knows."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {name: self._of(Gauge, name, text, model_name) for name, text in _GAUGES.items()}
        self._counters = {name: self._of(Counter, name, text, model_name) for name, text in _COUNTERS.items()}
        self._histograms = {
            name: self._of(Histogram, name, text, model_name, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._model_name = model_name
        self._spec_gauges: dict[str, Any] = {}  # made when an engine turns out to speculate
        self._by_position: Any = None
        self._clocks: dict[Answer, _Clock] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._reused = self._prompted = 0
        self._knows_engine = False
        self.num_steps = 0

    def _of(self, kind: Any, name: str, text: str, model_name: str, **options: Any) -> Any:  # noqa: ANN401
        return kind(f"k3lib:{name}", text, (_LABEL,), registry=self._registry, **options).labels(model_name)

    def begin(self, answer: Answer) -> None:
        """Take note of a new answer."""
        self._clocks[answer] = _Clock(time.monotonic())
        self._counters["num_requests"].inc()

    def step(self, answer: Answer) -> None:
        """Take note of a step."""
        self.num_steps += 1
        clock = self._clocks[answer]
        count = len(answer.ids) - clock.tokens
        if not count:
            return
        clock.tokens += count
        now = time.monotonic()
        if clock.last is None:
            self._histograms["time_to_first_token_seconds"].observe(now - clock.started)
            self._count_prompt(answer)
            count_between = count - 1
        else:
            count_between = count
        last = clock.started if clock.last is None else clock.last
        for _ in range(count_between):
            self._histograms["inter_token_latency_seconds"].observe((now - last) / count)
        clock.last = now
        self._counters["generation_tokens"].inc(count)
        self._forget(now)
        self._recent.append((now, count))

    def _count_prompt(self, answer: Answer) -> None:
        self._counters["prompt_tokens"].inc(len(answer.prompt_ids))
        self._prompted += len(answer.prompt_ids)
        if answer.cached_tokens is not None:
            self._reused += answer.cached_tokens
            self._counters["cached_tokens"].inc(answer.cached_tokens)
            self._counters["cached_state_tokens"].inc(answer.cached_tokens)
            self._counters["cached_kv_tokens"].inc(max(answer.kv_tokens or 0, answer.cached_tokens))

    def end(self, answer: Answer) -> None:
        """Take note of the end of an answer, whatever it was."""
        clock = self._clocks.pop(answer, None)
        if clock is None:
            return
        if answer.finish_reason is None:
            self._counters["num_aborted_requests"].inc()
        else:
            self._histograms["e2e_request_latency_seconds"].observe(time.monotonic() - clock.started)

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > _WINDOW:
            self._recent.popleft()

    def engine_state(self, stats: Mapping[str, Any]) -> None:
        """Take over what `Engine.stats` says."""
        self._knows_engine = True
        cache = stats["cache"]
        full = 1 - (stats["free_pages"] + stats["cached_pages"]) / max(cache["num_pages"], 1)
        state = 1 - (stats["free_slots"] + stats["cached_slots"]) / max(cache["num_slots"], 1)
        values = {
            "num_running_reqs": stats["running"],
            "num_queue_reqs": stats["waiting"],
            "token_usage": max(full, state),
            "full_token_usage": full,
            "mamba_usage": state,
            "max_total_num_tokens": cache["num_pages"] * cache["page_size"],
            "num_retracted_reqs": stats["preempted"],
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        if stats.get("speculation") is not None:
            self._speculation(stats["speculation"])

    def _speculation(self, found: Mapping[str, Any]) -> None:
        if not self._spec_gauges:
            self._spec_gauges = {n: self._of(Gauge, n, text, self._model_name) for n, text in _SPEC_GAUGES.items()}
            self._by_position = Gauge(
                "k3lib:spec_accept_rate_by_position",
                "Part of the verified draft tokens of one place in the draft that was accepted.",
                (_LABEL, "position"),
                registry=self._registry,
            )
        steps = found["steps"]
        values = {
            "spec_accept_length": found["accept_length"],
            "spec_accept_rate": found["accept_rate"],
            "spec_cap_length": (found["proposed"] + steps) / steps if steps else 0,
            "spec_num_draft_tokens": found["proposed"],
            "spec_num_accepted_tokens": found["accepted"],
            "spec_num_verify_steps": steps,
            "spec_simulated": int(found["simulated"]),
        }
        for name, value in values.items():
            self._spec_gauges[name].set(value)
        for place, (accepted, tried) in enumerate(zip(found["by_position"], found["tried_by_position"], strict=True)):
            self._by_position.labels(self._model_name, str(place)).set(accepted / tried if tried else 0)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        self._forget(time.monotonic())
        if not self._knows_engine:
            self._gauges["num_running_reqs"].set(len(self._clocks))
        self._gauges["gen_throughput"].set(sum(count for _, count in self._recent) / _WINDOW)
        self._gauges["cache_hit_rate"].set(self._reused / self._prompted if self._prompted else 0)
        return generate_latest(self._registry)
