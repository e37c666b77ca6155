"""The simple ways to use an engine, whatever is behind it: prompts to the end, or token by token."""

from __future__ import annotations

import abc
import collections
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from k3lib.engine.request import Output, Request, SamplingParams, StepOutput
from k3lib.errors import ConfigError, K3Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3lib.engine.media import Media

__all__ = ["Prompts"]


class Prompts(abc.ABC):
    """`generate` and `stream` by means of requests and steps, which a subclass has."""

    _inboxes: dict[str, collections.deque[StepOutput]]  # what came for requests of these two; `_step` fills them

    @abc.abstractmethod
    def add(self, request: Request) -> str:
        """Queue a request; returns its name."""

    @abc.abstractmethod
    def abort(self, request_id: str) -> bool:
        """Drop a request."""

    @abc.abstractmethod
    def has_room(self, priority: int = 0) -> bool:
        """Whether the queue takes one more request of a priority."""

    @abc.abstractmethod
    def make_requests(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None,
        media: Sequence[Sequence[Media]] | None,
    ) -> list[Request]:
        """The requests of `generate`, checked; arguments and errors as there."""

    @abc.abstractmethod
    def _step(self) -> None:
        """Compute one step."""

    @abc.abstractmethod
    def _is_open(self, name: str) -> bool:
        """Whether a request will have outputs yet."""

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        media: Sequence[Sequence[Media]] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Run prompts to the end and return their outputs in the same order.

        Args:
            prompts: token ids, or text if the engine has a tokenizer.
            params: one for all, or one each.
            media: images of each prompt.
            progress: show a bar of finished prompts.

        Raises:
            RequestError: a prompt that can never run; nothing has been queued.
            ConfigError: another number of params or media than prompts, or text without a tokenizer.
        """
        requests = self.make_requests(prompts, params, media)
        names: list[str] = []
        results: list[list[StepOutput]] = []
        try:
            with tqdm(total=len(prompts), desc="generate", unit="prompt", disable=not progress) as bar:
                for request in requests:
                    while not self.has_room(request.priority):
                        self._step()
                    names.append(self._submit(request))
                for name in names:
                    results.append(list(self._outputs(name)))
                    bar.update()
        finally:
            for name in names:
                self._forget(name)
        return [Output.join(request, outs) for request, outs in zip(requests, results, strict=True)]

    def stream(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        **sampling: Any,  # noqa: ANN401 - fields of SamplingParams
    ) -> Iterator[int]:
        """Yield the tokens of one request as they come: `stream(ids, max_new_tokens=16)`.

        Args:
            prompt: token ids, or text if the engine has a tokenizer.
            params: sampling parameters; or give them by name.
            media: images of the prompt.
            sampling: fields of `SamplingParams`.

        Raises:
            ConfigError: both `params` and single fields.
            RequestError: a prompt that can never run.
            K3Error: while iterating, if the request ends with "error": its logits are not finite, or its step failed.
        """
        if params is not None and sampling:
            raise ConfigError(f"stream: give params or single fields, not both ({', '.join(sampling)})")
        (request,) = self.make_requests([prompt], params or SamplingParams(**sampling), [media])
        return self._tokens(request)

    def _tokens(self, request: Request) -> Iterator[int]:
        name = self._submit(request)
        try:
            for out in self._outputs(name):
                yield from out.token_ids
                if out.finish == "error":
                    raise K3Error(f"{name} ended with an error: its logits are not finite, or its step failed")
        finally:
            self._forget(name)

    def _submit(self, request: Request) -> str:
        name = self.add(request)
        self._inboxes[name] = collections.deque()
        return name

    def _outputs(self, name: str) -> Iterator[StepOutput]:
        """Outputs of a submitted request to its end, with steps as needed; "abort" if somebody dropped it."""
        inbox, finish = self._inboxes[name], None
        while finish is None:
            while not inbox and self._is_open(name):
                self._step()
            out = inbox.popleft() if inbox else StepOutput([], "abort", request_id=name)
            finish = out.finish
            yield out

    def _forget(self, name: str) -> None:
        del self._inboxes[name]
        self.abort(name)
