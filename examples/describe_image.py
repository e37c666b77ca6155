"""Ask about a picture, in the steps that the server takes: pixels to patches, message to prompt, both into the engine.

The built-in model is random, so its words mean nothing; with `load_model(FOLDER, vision=True)` they do.
"""

from PIL import Image, ImageDraw

from k3lib.engine import Engine, EngineConfig, Request, SamplingParams
from k3lib.engine.media import PromptImage
from k3lib.multimodal import expand_placeholders
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.images import image_prompt, preprocess_image
from k3lib.server.loading import load_model
from k3lib.server.tokenizer import load_tokenizer

picture = Image.new("RGB", (200, 120), "white")
ImageDraw.Draw(picture).ellipse((60, 20, 140, 100), fill="red")

model, tok = load_model(None, vision=True), load_tokenizer()
engine = Engine(model, EngineConfig(context_length=1024, checkpoint_grid=64))


def ask(question):
    """The tokens of an answer, and how many of the prompt were known already."""
    patches, grid = preprocess_image(picture)
    content = [{"type": "image_url", "image_url": {"url": "picture"}}, {"type": "text", "text": question}]
    segments = render_chat([{"role": "user", "content": content}], image_prompts=[image_prompt(*picture.size)])
    tokens = grid[1] * grid[2] // 4
    ids, (position,) = expand_placeholders(encode_segments(tok, segments), tok.special["<|media_pad|>"], [tokens])
    params = SamplingParams(temperature=0, max_new_tokens=8)
    engine.add(Request(ids, params, media=[PromptImage.of(position, patches, grid)]))
    answer, cached = [], 0
    while engine.has_work:
        for out in engine.step():
            answer, cached = answer + out.token_ids, out.cached_tokens
    print(f"{question}  {len(ids)} tokens, {tokens} of them the image, {cached} known: {tok.decode(answer)!r}")
    return answer


first = ask("What is in the picture?")
assert ask("What is in the picture?") == first
ask("Which colour has it?")
stats = engine.stats()["media"]
print(f"the tower ran {stats['images_encoded']} time for 3 questions")
assert stats["images_encoded"] == 1
