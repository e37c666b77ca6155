"""Ask about a picture, in the steps that the server takes: pixels to patches, message to prompt, both into the engine.

The built-in model knows plain shapes on small pictures; `load_model(FOLDER, vision=True)` loads another one.
"""

from PIL import Image, ImageDraw

from k3lib.engine import Engine, EngineConfig, Request, SamplingParams
from k3lib.engine.media import PromptImage
from k3lib.multimodal import expand_placeholders
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.images import image_prompt, preprocess_image
from k3lib.server.loading import load_model
from k3lib.server.tokenizer import load_tokenizer

picture = Image.new("RGB", (84, 84), "white")
ImageDraw.Draw(picture).ellipse((20, 20, 64, 64), fill=(220, 40, 40))

model, tok = load_model(None, vision=True), load_tokenizer()
engine = Engine(model, EngineConfig(context_length=1024, checkpoint_grid=64))


def ask(question):
    """The tokens of an answer, and how many of the prompt were known already."""
    patches, grid = preprocess_image(picture)
    content = [{"type": "image_url", "image_url": {"url": "picture"}}, {"type": "text", "text": question}]
    messages, prompts = [{"role": "user", "content": content}], [image_prompt(*picture.size)]
    segments = render_chat(messages, image_prompts=prompts, thinking=False)
    tokens = grid[1] * grid[2] // 4
    ids, (position,) = expand_placeholders(encode_segments(tok, segments), tok.special["<|media_pad|>"], [tokens])
    end = tok.special["<|close|>"]  # of the answer; after it come the brackets of the message
    params = SamplingParams(temperature=0, max_new_tokens=40, stop_token_ids=(end,))
    engine.add(Request(ids, params, media=[PromptImage.of(position, patches, grid)]))
    answer, cached = [], 0
    while engine.has_work:
        for out in engine.step():
            answer, cached = answer + out.token_ids, out.cached_tokens
    print(f"{question}  {len(ids)} tokens, {tokens} of them the image, {cached} known: {tok.decode(answer[:-1])!r}")
    return answer


first = ask("What shape is this?")
assert ask("What shape is this?") == first
ask("What color is it?")
stats = engine.stats()["media"]
print(f"the tower ran {stats['images_encoded']} time for 3 questions")
assert stats["images_encoded"] == 1
