"""The HTTP server: OpenAI's endpoints, and those of operators, over any object with `generate`."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

import k3lib
from k3lib.server.admin import add_admin_routes
from k3lib.server.answers import StepSource
from k3lib.server.chat_completions import answer_chat
from k3lib.server.completions import answer_completion
from k3lib.server.config import ApiConfig
from k3lib.server.failures import add_error_handlers
from k3lib.server.fast_json import load
from k3lib.server.gate import Gate
from k3lib.server.image_input import ImageReader
from k3lib.server.metrics import Metrics
from k3lib.server.native import answer_generate, detokenize, tokenize, tokenizer_info
from k3lib.server.page import PAGE_HEADERS, page
from k3lib.server.schemas import (
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    DetokenizeRequest,
    ErrorAnswer,
    GenerateRequest,
    TokenizeRequest,
)
from k3lib.server.served import Served
from k3lib.server.tokenizer import Tokenizer

__all__ = ["StepSource", "create_app"]

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def create_app(
    engine: StepSource,
    tok: Tokenizer,
    *,
    model_name: str,
    max_model_len: int,
    config: ApiConfig | None = None,
    info: Mapping[str, object] | None = None,
    images: ImageReader | None = None,
) -> FastAPI:
    """Make the ASGI application.

    Statistics, flushing and new weights need an engine with `call`, as `k3lib.engine.AsyncEngine` has it; over another
    one they answer 501.

    Args:
        engine: generates the tokens.
        tok: encodes prompts and decodes answers; it also decides which ids stop a request.
        model_name: the only value of `model` that requests may name.
        max_model_len: upper bound of prompt and generated tokens together.
        config: keys, limits and rules.
        info: what `/server_info` shows besides the state of the engine.
        images: reads the images of requests; None, where no vision tower is loaded, refuses them.

    Returns:
        The app; `app.state.served` is what its requests share.
    """
    app = FastAPI(title="k3lib", version=k3lib.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = _Route
    config = config or ApiConfig()
    served = Served(
        engine, tok, model_name, max_model_len, config, Metrics(model_name), info=dict(info or {}), images=images
    )
    add_error_handlers(app)
    _add_page(app)
    _add_model_routes(app, served)
    _add_generating_routes(app, served)
    add_admin_routes(app, served)
    app.state.served = served
    app.add_middleware(Gate, served=served)
    if config.cors_origins:
        # outermost: a browser asks beforehand, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class _JSONRequest(Request):
    """Reads its body with the fast parser."""

    async def json(self) -> Any:  # noqa: ANN401
        if not hasattr(self, "_json"):
            self._json = load(await self.body())
        return self._json


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_fast(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return handle_fast


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        """The chat page."""
        return HTMLResponse(page(), headers=PAGE_HEADERS)


def _add_model_routes(app: FastAPI, served: Served) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [served.card()]})

    @app.get("/v1/models/{model_id:path}", responses=ERRORS)
    async def model(model_id: str) -> Response:
        """The model, if that is its name."""
        served.check_model(model_id)
        return JSONResponse(served.card())


def _add_generating_routes(app: FastAPI, served: Served) -> None:
    @app.post("/v1/chat/completions", responses={200: {"model": ChatAnswer}, **ERRORS})
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        return await answer_chat(served, body, http)

    @app.post("/v1/completions", responses={200: {"model": CompletionAnswer}, **ERRORS})
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue raw prompts; with `stream`, as server-sent events."""
        return await answer_completion(served, body, http)

    @app.post("/generate", responses=ERRORS)
    async def generate(body: GenerateRequest, http: Request) -> Response:
        """Continue raw prompts, in the form of sglang's own endpoint."""
        return await answer_generate(served, body, http)

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize_prompt(body: TokenizeRequest) -> Response:
        """Token ids of a raw prompt or of a chat request."""
        return await tokenize(served, body)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize_ids(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        return await detokenize(served, body)

    @app.get("/tokenizer_info")
    async def tokenizer_names() -> Response:
        """Special tokens and the size of the vocabulary."""
        return tokenizer_info(served)
