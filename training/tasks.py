"""Generators of chats with a known answer, one for each ability, and the judge of answers.

Nothing is scraped: texts come from the templates and word lists below. `make(seed, split, kind)` is a pure function.
Reasoning is short at low effort and longer at high and max; without thinking the steps stand in the answer.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training import pictures
from training.words import ANIMALS, COLORS, FOODS, THINGS, Split, Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3lib.server.chat import ParsedOutput
    from training.pictures import Picture

__all__ = ["KINDS", "Item", "check", "make"]

Message = dict[str, Any]


@dataclass(slots=True)
class Item:
    """A conversation up to the last question, and what should come next.

    Attributes:
        kind: the ability.
        messages: up to the message to be answered.
        answer: the assistant's message that is trained on.
        expect: what `check` looks at: one of number, words, calls, json, text.
        tools, effort, thinking, response_format, tool_choice: as `render_chat` takes them.
        images: pixels in the order of the prompt.
        learn_history: whether earlier messages of the assistant are learnt too.
        before: makes a turn that may stand in front, for chats over several turns.
    """

    kind: str
    messages: list[Message]
    answer: Message
    expect: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    effort: str | None = "max"
    thinking: bool = True
    response_format: dict[str, Any] | None = None
    tool_choice: str | None = None
    images: list[Picture] = field(default_factory=list)
    learn_history: bool = True
    before: Callable[[], list[Message]] | None = field(default=None, compare=False)


@dataclass(slots=True)
class Style:
    """How much an answer thinks."""

    effort: str | None
    thinking: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Style:
        roll = rng.random()
        if roll < 0.08:
            return cls(None, thinking=False)
        return cls("max" if roll < 0.5 else "low" if roll < 0.75 else "high" if roll < 0.9 else None, thinking=True)

    @property
    def is_brief(self) -> bool:
        """Low effort."""
        return self.effort == "low"

    def say(self, content: str, long: str, short: str = "", *, steps: bool = False) -> Message:
        """An assistant's message; `steps`: the answer needs its reasoning, so without thinking it is spelled out."""
        if not self.thinking:
            return {"role": "assistant", "content": f"{short or long}\n{content}" if steps else content}
        reasoning = short if self.is_brief else long
        return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _finish(
    kind: str, style: Style, messages: list[Message], answer: Message, expect: dict[str, Any], **more: Any
) -> Item:
    return Item(kind, messages, answer, expect, effort=style.effort, thinking=style.thinking, **more)


# ---- arithmetic ---------------------------------------------------------------------------------


def _add(a: int, b: int) -> tuple[str, str]:
    x, y = str(a)[::-1], str(b)[::-1]
    carry, lines, brief = 0, [], []
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        sum_text = f"{p}+{q}" + (f"+{carry}" if carry else "") + f"={total}"
        carry = total // 10
        lines.append(f"{sum_text}, write {total % 10}" + (", carry 1" if carry else ""))
        brief.append(sum_text)
    return "\n".join([f"{a}+{b}:", *lines, f"So {a + b}."]), f"{' '.join(brief)} so {a + b}"


def _subtract(a: int, b: int) -> tuple[str, str]:
    x, y = str(a)[::-1], str(b)[::-1]
    borrow, lines, brief = 0, [], []
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i]) if i < len(y) else 0
        top = p + 10 if p < q + borrow else p
        text = f"{top}-{q}" + (f"-{borrow}" if borrow else "") + f"={top - q - borrow}"
        borrow = int(top > p)
        lines.append(text + (", borrow 1" if borrow else ""))
        brief.append(text)
    return "\n".join([f"{a}-{b}:", *lines, f"So {a - b}."]), f"{' '.join(brief)} so {a - b}"


def _multiply(a: int, b: int) -> tuple[str, str]:
    """By a digit; with two of them, each product by itself, then their sum."""
    if b >= 10:
        return _multiply_twice(a, b)
    carry, lines, brief = 0, [], []
    for digit in map(int, reversed(str(a))):
        total = digit * b + carry
        text = f"{digit}*{b}" + (f"+{carry}" if carry else "") + f"={total}"
        carry = total // 10
        lines.append(f"{text}, write {total % 10}" + (f", carry {carry}" if carry else ""))
        brief.append(text)
    return "\n".join([f"{a}*{b}:", *lines, f"So {a * b}."]), f"{' '.join(brief)} so {a * b}"


def _multiply_twice(a: int, b: int) -> tuple[str, str]:
    tens, ones = divmod(b, 10)
    parts = [(f"{a}*{ones}", _multiply(a, ones)[1])] if ones else []
    parts.append((f"{a}*{tens}", f"{_multiply(a, tens)[1]}, tens {a * tens * 10}"))
    if ones:
        parts.append((f"{a * ones}+{a * tens * 10}", _add(a * ones, a * tens * 10)[1]))
    lines = [f"{what}: {how}" for what, how in parts]
    return "\n".join([f"{a}*{b}:", *lines, f"So {a * b}."]), ", ".join(how for _, how in parts)


def _divide(a: int, b: int) -> tuple[str, str]:
    rest, lines, brief = 0, [], []
    for digit in str(a):
        part = int(f"{rest}{digit}")
        rest = part % b
        lines.append(f"{part}/{b}={part // b}, rest {rest}")
        brief.append(f"{part}/{b}={part // b}r{rest}")
    return "\n".join([f"{a}/{b}:", *lines, f"So {a // b}."]), f"{' '.join(brief)} so {a // b}"


def _hundredth(n: int) -> str:
    """A hundredth of it, without zeros at the end: 24.5, 36, 0.07."""
    return f"{n // 100}.{n % 100:02}".rstrip("0").rstrip(".")


def _percent(p: int, n: int) -> tuple[str, str]:
    """The product, its point moved by two places: exact, never rounded."""
    (long, short), value = _multiply(n, p), _hundredth(n * p)
    return f"{long}\n{n * p}/100={value}", f"{short}, /100 {value}"


_ASK = {
    "+": ["What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} plus {b}?", "{a}+{b}"],
    "-": ["What is {a} - {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "{a}-{b}"],
    "*": ["What is {a} * {b}?", "{a} x {b} = ?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "{a}*{b}"],
    "/": ["What is {a} / {b}?", "{a} / {b} = ?", "Divide {a} by {b}.", "How much is {a} divided by {b}?", "{a}/{b}"],
    "%": ["What is {a}% of {b}?", "{a}% of {b} = ?", "Calculate {a}% of {b}.", "How much is {a}% of {b}?"],
}


def _up_to(rng: random.Random, digits: int) -> int:
    """All numbers of digits alike: small ones next to large ones."""
    return rng.randint(1, 10 ** rng.randint(1, digits) - 1)


def _numbers(rng: random.Random, op: str) -> tuple[int, int]:
    if op == "%":
        if rng.random() < 0.6:
            return 5 * rng.randint(1, 19), 10 * rng.randint(1, 99)
        return rng.randint(1, 99), rng.randint(10, 999)
    if op == "*":
        return _up_to(rng, 3), rng.randint(2, 9) if rng.random() < 0.7 else rng.randint(10, 99)
    if op == "/":
        b = rng.randint(2, 9)
        return b * _up_to(rng, 3), b
    a, b = _up_to(rng, 4), _up_to(rng, 4)
    return (max(a, b), min(a, b)) if op == "-" else (a, b)


def arithmetic(words: Words, style: Style) -> Item:
    """Sums, products, quotients without rest, percentages; some as a short story."""
    rng = words.rng
    while True:
        op = rng.choice("++--**//%%%")
        a, b = _numbers(rng, op)
        low, high = sorted((a, b)) if op in "+*" else (a, b)  # 3+8 tells what 8+3 is
        if words.mine(f"{low}{op}{high}"):
            break
    long, short = _percent(a, b) if op == "%" else _STEPS[op](a, b)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b, "%": _hundredth(a * b)}[op]
    text = rng.choice(_ASK[op]).format(a=a, b=b)
    told = f"{a}% of {b} is {value}." if op == "%" else f"{a} {op} {b} = {value}."
    if rng.random() < 0.2 and op in "+-*":
        who, thing = words.person(), rng.choice(THINGS)
        text, told = {
            "+": (f"{who} has {a} {thing} and buys {b} more. How many {thing} now?", f"{who} has {value} {thing}."),
            "-": (f"{who} had {a} {thing} and gave away {b}. How many are left?", f"{value} {thing} are left."),
            "*": (f"{who} has {a} boxes with {b} {thing} each. How many {thing}?", f"{who} has {value} {thing}."),
        }[op]
    answer = style.say(told, long, short, steps=True)
    return _finish("arithmetic", style, [_user(text)], answer, {"number": float(value)})


_STEPS = {"+": _add, "-": _subtract, "*": _multiply, "/": _divide}


# ---- tools --------------------------------------------------------------------------------------


def _schema(name: str, about: str, parameters: dict[str, dict[str, Any]], required: list[str]) -> dict[str, Any]:
    shape = {"type": "object", "properties": parameters, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": shape}}


def _dress(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """What people add to declarations, which changes nothing."""
    function = dict(schema["function"])
    shape = function["parameters"] = dict(function["parameters"])
    if rng.random() < 0.15:
        shape["additionalProperties"] = False
    if rng.random() < 0.1:
        function["strict"] = True
    if rng.random() < 0.15:
        shape["properties"] = {
            key: {"description": f"The {key}", **value} for key, value in shape["properties"].items()
        }
    return {**schema, "function": function}


_VERBS = "get find set send book open check make play start stop move read call show add".split()
_ARGUMENTS = "city name color size level count date room title speed mode food animal code".split()


@dataclass(slots=True)
class _Tool:
    """A tool with one way to use it.

    Attributes:
        topic: what it is about; two tools of one topic are never offered together, so that a wish names one of them.
        schema: its declaration.
        wish: what a user says who wants it called.
        arguments: of that call.
        result: what it returns, as JSON.
        told: what is said of the result.
        facts: words of the result that must be said.
        again: the same tool used in another way.
        city: the argument that names a city, if the call has no other.
    """

    topic: str
    schema: dict[str, Any]
    wish: str
    arguments: dict[str, Any]
    result: str
    told: str
    facts: list[str]
    again: Callable[[], _Tool]
    city: str | None = None

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


_SKIES = "sunny cloudy rainy windy foggy".split()
_ASK_WEATHER = [
    "What's the weather in {}?", "How is the weather in {}?", "What is the weather like in {} today?", "Weather in {}?",
    "Is it warm in {}?", "the weather in {} please",
]  # fmt: skip
_PLACES = ["location", "city", "place"]
_MONEY = "EUR USD JPY GBP CHF".split()
_TEXTS = (["See you at", "Meet me at", "I will be late for"], ["noon", "lunch", "the station", "work", "dinner"])


def _place(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An argument that takes a city."""
    about = rng.choice(["The city name", "City", "Name of the city"])
    return rng.choice(_PLACES), {"type": "string", "description": about}


def _weather(words: Words) -> _Tool:
    rng = words.rng
    key, where = _place(rng)
    parameters = {key: where}
    if rng.random() < 0.4:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5:
            parameters["unit"]["description"] = rng.choice(["Temperature unit", "Unit of the temperature", "The unit"])
    name = rng.choice(["get_weather", "get_weather", "get_current_weather", "weather"])
    about = rng.choice(["Get the current weather for a location", "Get the weather of a city", "Current weather"])
    schema = _schema(name, about, parameters, [key])

    def use() -> _Tool:
        city, sky, degrees = words.city(), rng.choice(_SKIES), rng.randint(-9, 39)
        result: dict[str, Any] = {rng.choice(["temperature", "temp", "celsius", "degrees"]): degrees}
        told, facts = f"It is {degrees} degrees in {city}.", [str(degrees), city]
        if rng.random() < 0.6:
            result[rng.choice(["sky", "condition", "weather"])] = sky
            told, facts = f"It is {degrees} degrees and {sky} in {city}.", [*facts, sky]
        if rng.random() < 0.3:
            result = {key: city, **result}
        wish = rng.choice(_ASK_WEATHER).format(city)
        return _Tool("weather", schema, wish, {key: city}, json.dumps(result), told, facts, use, key)

    return use()


def _time(words: Words) -> _Tool:
    rng = words.rng
    key, where = _place(rng)
    schema = _schema("get_time", "Get the local time of a city", {key: where}, [key])

    def use() -> _Tool:
        city, clock = words.city(), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        return _Tool(
            "time", schema, f"What time is it in {city}?", {key: city}, json.dumps({"time": clock}),
            f"It is {clock} in {city}.", [clock, city], use, key,
        )  # fmt: skip

    return use()


def _people(words: Words) -> _Tool:
    rng = words.rng
    key, where = _place(rng)
    schema = _schema("get_population", "Number of people in a city", {key: where}, [key])

    def use() -> _Tool:
        city, count = words.city(), rng.randint(10, 9999) * 100
        return _Tool(
            "people", schema, f"How many people live in {city}?", {key: city}, json.dumps({"population": count}),
            f"{count} people live in {city}.", [str(count), city], use, key,
        )  # fmt: skip

    return use()


def _convert(words: Words) -> _Tool:
    rng = words.rng
    parameters = {"amount": {"type": "number"}, "from": {"type": "string"}, "to": {"type": "string"}}
    schema = _schema("convert", "Convert money", parameters, list(parameters))

    def use() -> _Tool:
        amount, (one, other), value = rng.randint(1, 900), rng.sample(_MONEY, 2), rng.randint(1, 9999)
        return _Tool(
            "money", schema, f"Convert {amount} {one} to {other}.", {"amount": amount, "from": one, "to": other},
            json.dumps({"value": value}), f"{amount} {one} are {value} {other}.", [str(value), other], use,
        )  # fmt: skip

    return use()


def _message(words: Words) -> _Tool:
    parameters = {"to": {"type": "string"}, "text": {"type": "string"}}
    schema = _schema("send_message", "Send a message to a person", parameters, ["to", "text"])

    def use() -> _Tool:
        who, text = words.person(), " ".join(map(words.rng.choice, _TEXTS))
        return _Tool(
            "message", schema, f"Send a message to {who}: {text}", {"to": who, "text": text},
            json.dumps({"status": "sent"}), f"The message to {who} is sent.", [who, "sent"], use,
        )  # fmt: skip

    return use()


def _timer(words: Words) -> _Tool:
    schema = _schema("set_timer", "Start a timer", {"minutes": {"type": "integer"}}, ["minutes"])

    def use() -> _Tool:
        minutes = words.rng.randint(1, 90)
        return _Tool(
            "timer", schema, f"Set a timer for {minutes} minutes.", {"minutes": minutes},
            json.dumps({"status": "running"}), f"The timer is running for {minutes} minutes.",
            [str(minutes), "running"], use,
        )  # fmt: skip

    return use()


def _song(words: Words) -> _Tool:
    parameters = {"title": {"type": "string", "description": "Title of the song"}}
    schema = _schema("play_song", "Play a song", parameters, ["title"])

    def use() -> _Tool:
        title = f"{words.made_up().capitalize()} {words.rng.choice(ANIMALS)}"
        return _Tool(
            "song", schema, f"Play the song {title}.", {"title": title}, json.dumps({"status": "playing"}),
            f"{title} is playing.", [title, "playing"], use,
        )  # fmt: skip

    return use()


_KNOWN: list[Callable[[Words], _Tool]] = [_weather, _weather, _time, _people, _convert, _message, _timer, _song]


def _known_tool(words: Words) -> _Tool:
    """A tool that people really have."""
    return words.rng.choice(_KNOWN)(words)


def _value(words: Words, kind: str) -> Any:
    rng = words.rng
    if kind == "integer":
        return rng.randint(0, 999)
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice(
        [words.city, words.person, words.made_up, lambda: rng.choice(COLORS), lambda: rng.choice(FOODS)]
    )()


def _said(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _new_tool(words: Words) -> _Tool:
    """A tool nobody has seen: name, arguments and values are made up."""
    rng = words.rng
    while True:
        noun = words.made_up((1, 3))
        name = f"{rng.choice(_VERBS)}_{noun}" if rng.random() < 0.7 else noun
        keys = [
            rng.choice(_ARGUMENTS) if rng.random() < 0.5 else words.made_up((1, 2)) for _ in range(rng.randint(1, 4))
        ]
        if len(set(keys)) == len(keys) and words.mine(name) and words.mine(" ".join(keys)):
            break
    kinds = {key: rng.choice(["string", "string", "integer", "boolean"]) for key in keys}
    spoken = name.replace("_", " ")
    schema = _schema(name, spoken.capitalize(), {key: {"type": kind} for key, kind in kinds.items()}, keys)

    def use() -> _Tool:
        arguments = {key: _value(words, kind) for key, kind in kinds.items()}
        pairs = [f"{key} {_said(value)}" for key, value in arguments.items()]
        wish = rng.choice(
            [
                f"{spoken.capitalize()} with {' and '.join(pairs)}.",
                f"Use {name} with {', '.join(pairs)}.",
                f"Call {name}: {', '.join(f'{key}={_said(value)}' for key, value in arguments.items())}",
                f"Please {spoken} for me, {', '.join(pairs)}.",
            ]
        )
        key = rng.choice(["id", "status", "result", "level", "total"])
        value = _value(words, rng.choice(["integer", "string"]))
        told = f"Done: {key} is {value}."
        return _Tool(name, schema, wish, arguments, json.dumps({key: value}), told, [str(value)], use)

    return use()


def _tool(words: Words) -> _Tool:
    return _known_tool(words) if words.rng.random() < 0.45 else _new_tool(words)


def _call(tool: _Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "arguments": json.dumps(tool.arguments)}}


def _offer(words: Words, used: list[_Tool]) -> list[_Tool]:
    """Those that are used, and some others, in any order."""
    tools = {tool.topic: tool for tool in used}
    for _ in range(words.rng.choice([0, 0, 1, 1, 2, 3])):
        other = _tool(words)
        tools.setdefault(other.topic, other)
    listed = list(tools.values())
    words.rng.shuffle(listed)
    return listed


def _calling(style: Style, tools: list[_Tool]) -> Message:
    names = " and ".join(f"{t.name} with {', '.join(f'{k} {_said(v)}' for k, v in t.arguments.items())}" for t in tools)
    answer = style.say("", f"I call {names}.", " ".join(t.name for t in tools))
    return {**answer, "tool_calls": [_call(tool) for tool in tools]}


def _expect_calls(tools: list[_Tool]) -> dict[str, Any]:
    return {"calls": [[tool.name, tool.arguments] for tool in tools]}


def _wishes(tools: list[_Tool]) -> str:
    """What each of them is asked for, one sentence after the other."""
    *others, last = (tool.wish for tool in tools)
    return " ".join([*(wish if wish[-1] in ".?!" else f"{wish}." for wish in others), last])


def _answered(tool: _Tool) -> Message:
    return {"role": "tool", "name": tool.name, "content": tool.result}


def _telling(style: Style, tools: list[_Tool]) -> Message:
    returned = " ".join(f"{tool.name} returned {tool.result}." for tool in tools)
    return style.say(" ".join(tool.told for tool in tools), returned, "")


def _with_tools(words: Words, item: Item, used: list[_Tool], style: Style) -> Item:
    """The item with declarations: of what it uses, and of more."""
    rng, offered = words.rng, _offer(words, used)

    def before() -> list[Message]:
        chosen = rng.sample(offered, min(len(offered), rng.choice([1, 1, 2])))
        again = [tool.again() for tool in chosen]
        answers = [_answered(tool) for tool in again]
        return [_user(_wishes(again)), _calling(style, again), *answers, _telling(style, again)]

    item.tools, item.before = [_dress(rng, tool.schema) for tool in offered], before
    return item


def tool_call(words: Words, style: Style) -> Item:
    """One call, among up to four tools; now and then none is needed."""
    rng = words.rng
    if rng.random() < 0.1:
        item = rng.choice([arithmetic, small_talk])(words, style)
        item.kind = "tool_call"
        return _with_tools(words, item, [_tool(words)], style)
    tool = _tool(words)
    choice = "required" if rng.random() < 0.05 else None
    asked, answer, expect = [_user(tool.wish)], _calling(style, [tool]), _expect_calls([tool])
    item = _finish("tool_call", style, asked, answer, expect, tool_choice=choice)
    return _with_tools(words, item, [tool], style)


def tool_result(words: Words, style: Style) -> Item:
    """What to say once a tool has answered; at times in front of another call."""
    rng, tool = words.rng, _tool(words)
    if rng.random() < 0.06:
        reason = rng.choice(["not found", "no connection", "try again later", f"unknown {words.made_up()}"])
        tool = dataclasses.replace(
            tool, result=json.dumps({"error": reason}), told=f"That did not work: {reason}.", facts=[reason]
        )
    messages = [_user(tool.wish), _calling(style, [tool]), _answered(tool)]
    answer = _telling(style, [tool])
    other = _tool(words)
    if rng.random() < 0.3 and other.topic != tool.topic:
        messages += [answer, _user(other.wish)]
        item = _finish("tool_result", style, messages, _calling(style, [other]), _expect_calls([other]))
        return _with_tools(words, item, [tool, other], style)
    item = _finish("tool_result", style, messages, answer, {"words": tool.facts})
    return _with_tools(words, item, [tool], style)


def _elsewhere(words: Words, tool: _Tool, count: int) -> list[_Tool]:
    """The same tool for several cities."""
    assert tool.city is not None, "it takes one"
    here = tool.arguments[tool.city]
    cities = dict.fromkeys([here, *words.distinct("city", count)])
    return [dataclasses.replace(tool, arguments={tool.city: city}) for city in list(cities)[:count]]


def parallel_calls(words: Words, style: Style) -> Item:
    """Two or three calls at once: of one tool for several cities, or of several tools."""
    rng = words.rng
    first = _known_tool(words) if rng.random() < 0.6 else _new_tool(words)
    if first.city is not None and rng.random() < 0.8:
        used = _elsewhere(words, first, rng.choice([2, 2, 3]))
        cities = [tool.arguments[first.city] for tool in used]
        wish = first.wish.replace(cities[0], f"{', '.join(cities[:-1])} and {cities[-1]}")
    else:
        second = first
        while second.topic == first.topic:
            second = _tool(words)
        used = [first, second]
        wish = _wishes(used)
    item = _finish("parallel_calls", style, [_user(wish)], _calling(style, used), _expect_calls(used))
    return _with_tools(words, item, used, style)


# ---- JSON ---------------------------------------------------------------------------------------

_FIELDS = {
    "name": "string", "city": "string", "age": "integer", "color": "string", "food": "string", "pet": "string",
    "count": "integer", "member": "boolean", "tags": "array",
}  # fmt: skip


_SHAPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"}, "integer": {"type": "integer"}, "boolean": {"type": "boolean"},
    "array": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip


def _field(words: Words, name: str, kind: str) -> Any:
    """A value of a field."""
    rng = words.rng
    if kind == "array":
        return rng.sample(COLORS, rng.randint(1, 3))
    if name in ("color", "food", "pet"):
        return rng.choice({"color": COLORS, "food": FOODS, "pet": ANIMALS}[name])
    if name == "age":
        return rng.randint(1, 99)
    return words.person() if name == "name" else words.city() if name == "city" else _value(words, kind)


def _listed(words: Words, values: dict[str, Any]) -> str:
    """A sentence or a list with all of them, in any order."""
    rng = words.rng
    parts = [f"{name} {' '.join(v) if isinstance(v, list) else _said(v)}" for name, v in values.items()]
    rng.shuffle(parts)
    asked = rng.choice(["{}", "Extract: {}", "Give me JSON for {}", "As JSON: {}"])
    return asked.format(rng.choice([", ", "; ", " and "]).join(parts) + ".")


def json_answer(words: Words, style: Style) -> Item:
    """An object that fits a schema, from a sentence or a list."""
    rng = words.rng
    while True:
        names = rng.sample(sorted(_FIELDS), rng.randint(1, 4))
        kinds = {name: _FIELDS[name] for name in names}
        for _ in range(rng.choice([0, 1, 1, 2])):
            kinds[words.made_up((1, 2))] = rng.choice(["string", "integer", "boolean"])
        if words.mine(" ".join(sorted(kinds))):
            break
    order = rng.sample(list(kinds), len(kinds))  # the prompt shows properties sorted, what is required as it was given

    def turn() -> tuple[dict[str, Any], list[Message]]:
        values = {name: _field(words, name, kind) for name, kind in kinds.items()}
        told = json.dumps({name: values[name] for name in order}, separators=(",", ":"))
        return values, [_user(_listed(words, values)), style.say(told, f"The fields are {', '.join(order)}.", "")]

    shape = {
        "type": "object", "required": order, "additionalProperties": False,
        "properties": {name: _SHAPES[kinds[name]] for name in order},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": shape}}
    values, (asked, answer) = turn()
    item = _finish("json", style, [asked], answer, {"json": values}, response_format=form)
    item.before = lambda: turn()[1]
    return item


# ---- recall and memory --------------------------------------------------------------------------

LONGEST = 15_000  # bytes of the text to look into; with the rest of the prompt below 16k tokens
_LENGTHS = ((0.78, 200, 1500), (0.14, 1500, 5000), (0.08, 3000, LONGEST))  # how often between which lengths


def _text_length(rng: random.Random) -> int:
    _, low, high = rng.choices(_LENGTHS, [share for share, *_ in _LENGTHS])[0]
    return int(low * (high / low) ** rng.random())


def _lines(words: Words, length: int) -> tuple[list[str], dict[str, str]]:
    """About `length` bytes of lines, and the codes in them."""
    rng, lines, codes, room = words.rng, [], {}, length
    while room > 0 or not codes:
        name = words.person()
        if rng.random() < 0.5 and name not in codes:
            codes[name] = str(rng.randint(100, 9999)) if rng.random() < 0.7 else words.made_up((1, 2))
            line = f"The code of {name} is {codes[name]}."
        else:
            line = rng.choice([
                f"{name} likes {rng.choice(FOODS)}.", f"{name} lives in {words.city()}.",
                f"{name} has {rng.randint(2, 99)} {rng.choice(THINGS)}.",
                f"The {rng.choice(ANIMALS)} is {rng.choice(COLORS)}.",
            ])  # fmt: skip
        lines.append(line)
        room -= len(line) + 1
    return lines, codes


def recall(words: Words, style: Style, length: int | None = None, questions: int | None = None) -> Item:
    """A key among many lines.

    Args:
        words: of one split.
        style: of the answer.
        length: about the bytes of the text; None draws.
        questions: in turns; None draws: the tokens of the text are dear and teach little else.
    """
    rng = words.rng
    length = _text_length(rng) if length is None else length
    questions = rng.randint(1, 6) if questions is None else questions
    lines, codes = _lines(words, length)
    messages: list[Message] = []
    for turn, who in enumerate(rng.sample(list(codes), min(questions, len(codes)))):
        question = rng.choice(["What is the code of {}?", "Which code has {}?", "Tell me the code of {}."]).format(who)
        text = "\n".join([question] if turn else [*lines, question] if rng.random() < 0.7 else [question, *lines])
        code = codes[who]
        messages += [_user(text), style.say(f"The code of {who} is {code}.", f"I look for {who}: {code}.", "")]
    answer = messages.pop()
    return _finish("recall", style, messages, answer, {"words": [code]})


def _facts(words: Words) -> list[tuple[str, str, str, str, str]]:
    """What somebody tells: the sentence, the reply, the question, its answer, the word that counts."""
    rng, name, city = words.rng, words.person(), words.city()
    color, pet, food, number = rng.choice(COLORS), rng.choice(ANIMALS), rng.choice(FOODS), rng.randint(2, 999)
    called = words.person()
    return [
        (f"My name is {name}.", f"Nice to meet you, {name}.", "What is my name?", f"Your name is {name}.", name),
        (f"I live in {city}.", f"{city}, I see.", "Where do I live?", f"You live in {city}.", city),
        (f"My favorite color is {color}.", "I will keep it.", "What is my favorite color?", f"It is {color}.", color),
        (f"I have a {pet} called {called}.", f"Hello to {called}.", "What is my pet called?",
         f"Your {pet} is called {called}.", called),
        (f"I like {food}.", "Good choice.", "What do I like to eat?", f"You like {food}.", food),
        (f"My number is {number}.", "Noted.", "What is my number?", f"Your number is {number}.", str(number)),
    ]  # fmt: skip


def memory(words: Words, style: Style) -> Item:
    """Facts of earlier turns, with other talk in between."""
    rng = words.rng
    facts = rng.sample(_facts(words), rng.randint(1, 4))
    messages: list[Message] = []
    for said, reply, *_ in facts:
        messages += [_user(said), style.say(reply, "", "")]
        if rng.random() < 0.3:
            other = rng.choice([small_talk, arithmetic])(words, style)
            messages += [*other.messages, other.answer]
    rng.shuffle(facts)
    asked = facts[: rng.randint(1, len(facts))]
    for _, _, question, told, word in asked[:-1]:
        messages += [_user(question), style.say(told, f"They told me: {word}.", "")]
    _, _, question, told, word = asked[-1]
    messages.append(_user(question))
    return _finish("memory", style, messages, style.say(told, f"They told me: {word}.", ""), {"words": [word]})


# ---- small talk ---------------------------------------------------------------------------------

_TALK = [
    (["Hi", "Hello", "Hey", "Hi there", "Good morning", "Good evening"], "Hello! How can I help you?"),
    (["Who are you", "What are you", "What is your name", "Tell me who you are"],
     "I am k3lib-nano, a very small Kimi-K3."),
    (["How are you", "How do you do", "How is it going"], "I am fine, thank you. And you?"),
    (["Thanks", "Thank you", "Thanks a lot", "Many thanks", "Great, thanks"], "You are welcome."),
    (["Bye", "Goodbye", "See you", "Good night", "See you later"], "Goodbye!"),
    (["What can you do", "How can you help me", "What are you good at"],
     "I can calculate, call tools, write JSON, find things in texts, and look at small pictures."),
    (["Are you a human", "Are you a robot", "Are you real"], "I am a small language model."),
    (["Tell me a joke", "Do you know a joke", "Make me laugh"],
     "Why did the tensor cross the road? To reduce the other side."),
    (["Do you speak German", "Do you speak French", "Which languages do you speak"], "I only speak a little English."),
    (["Who made you", "Who trained you", "Where do you come from"],
     "I was trained by the k3lib project on generated chats."),
    (["How large are you", "How many parameters do you have", "Are you big"], "I have about ten million parameters."),
    (["You are great", "Well done", "Good job", "Nice"], "Thank you!"),
]  # fmt: skip
_OPENERS = ["", "", "So, ", "Well, ", "Please: ", "OK. ", "Hm, ", "By the way, ", "Excuse me. "]
_ENDS = ["", "?", "!", ".", " :)", "??", "!!", " today?", " please"]


def small_talk(words: Words, style: Style) -> Item:
    """A question of a small set in many wordings, and its one answer."""
    rng = words.rng
    while True:
        asked, told = rng.choice(_TALK)
        core, opener = rng.choice(asked), rng.choice(_OPENERS)
        text = opener + (core if not opener or opener[-2] in ".:" else core[0].lower() + core[1:]) + rng.choice(_ENDS)
        text = text.lower() if rng.random() < 0.3 else text
        if words.mine(text):
            break
    return _finish("small_talk", style, [_user(text)], style.say(told, "Small talk.", ""), {"text": told})


# ---- pictures -----------------------------------------------------------------------------------


_ASK_PICTURE = {
    "colour": ["What color is the shape?", "Which color do you see?", "What color is it?"],
    "shape": ["What shape is this?", "Which shape do you see?", "What shape is in the picture?"],
    "count": ["How many shapes are there?", "Count the shapes.", "How many do you see?"],
    "digit": ["Which digit is this?", "What number do you see?", "Read the digit."],
}


def image(words: Words, style: Style) -> Item:
    """Colour, shape, count or digit of one picture."""
    rng = words.rng
    what = rng.choice(["colour", "shape", "count", "digit"])
    picture = (
        pictures.draw_digit(words)
        if what == "digit"
        else pictures.draw_shapes(words, rng.randint(1, 5) if what == "count" else rng.choice([1, 1, 1, 2, 3]))
    )
    facts = picture.facts
    value = facts[what]
    told = {"shape": f"It is a {value}.", "count": f"There {'is' if value == 1 else 'are'} {value}."}
    what_is_seen = "the digit {digit} in {colour}" if what == "digit" else "{count} {colour} {shape}"
    seen = f"I see {what_is_seen} on {{background}}.".format(**facts)
    text = {"type": "text", "text": rng.choice(_ASK_PICTURE[what])}
    parts = [{"type": "image"}, text] if rng.random() < 0.7 else [text, {"type": "image"}]
    expect = {"number": value} if what in ("count", "digit") else {"words": [value]}
    answer = style.say(told.get(what, f"It is {value}."), seen, "")
    return _finish("image", style, [{"role": "user", "content": parts}], answer, expect, images=[picture])


# ---- all of them --------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[Words, Style], Item], float]] = {  # with their part of the training data
    "arithmetic": (arithmetic, 0.23),
    "tool_call": (tool_call, 0.12),
    "tool_result": (tool_result, 0.07),
    "parallel_calls": (parallel_calls, 0.08),
    "json": (json_answer, 0.11),
    "recall": (recall, 0.11),
    "memory": (memory, 0.07),
    "small_talk": (small_talk, 0.04),
    "image": (image, 0.17),
}


_SYSTEM = [
    "You are a helpful assistant.", "You are Kimi, an AI assistant created by Moonshot AI.", "Answer briefly.",
    "You are a helpful assistant with access to tools.", "Be kind.", "You are a useful assistant. Think step by step.",
]  # fmt: skip


def make(seed: str, split: Split, kind: str | None = None, *, style: Style | None = None) -> Item:
    """One item: the same for equal arguments.

    Args:
        seed: any text.
        split: "train", or "held_out": words, numbers, names of tools, sets of arguments and pictures are disjoint.
        kind: one ability; None draws one as often as in training, and continues some chats over several turns.
        style: effort and thinking; None draws.
    """
    rng = random.Random(f"{split} {seed}")
    words = Words(rng, split)
    style = style or Style.draw(rng)
    if kind is not None:
        return KINDS[kind][0](words, style)
    name = rng.choices(list(KINDS), [share for _, share in KINDS.values()])[0]
    item = KINDS[name][0](words, style)
    if name in ("arithmetic", "small_talk", "image"):  # one preamble for several answers
        for _ in range(rng.randint(0, 6)):
            before = image if name == "image" else arithmetic if rng.random() < 0.85 else small_talk
            earlier = before(words, style)
            item.messages[:0] = [*earlier.messages, earlier.answer]
            item.images[:0] = earlier.images
    elif item.before is not None:
        for _ in range(rng.randint(0, 3)):
            item.messages[:0] = item.before()
    if rng.random() < 0.15:  # many clients send earlier answers back without their reasoning
        item.messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in item.messages]
        item.learn_history = False
    if rng.random() < 0.15:
        item.messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEM)})
    return item


def check(item: Item, answer: ParsedOutput) -> bool:
    """Whether an answer is exactly right: the number, the words, the calls or the object that was asked for."""
    expect, content = item.expect, answer.content or ""
    if "calls" in expect:
        return _same_calls(expect["calls"], answer)
    if answer.tool_calls:
        return False
    if "number" in expect:
        found = re.findall(r"-?\d+(?:\.\d+)?", content)
        return bool(found) and float(found[-1] if "=" in content or "%" in content else found[0]) == expect["number"]
    if "json" in expect:
        return _canonical(content) == _canonical(json.dumps(expect["json"]))
    if "text" in expect:
        return content.strip() == expect["text"]
    return all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", content) for word in expect["words"])


def _canonical(text: str) -> str | None:
    """JSON in one form, whatever the order of keys and the way to write a number; true is not 1. None if it is none."""
    try:
        value = json.loads(text, parse_float=lambda x: int(float(x)) if float(x).is_integer() else float(x))
    except (ValueError, OverflowError):
        return None
    return json.dumps(value, sort_keys=True)


def _same_calls(expected: list[list[Any]], answer: ParsedOutput) -> bool:
    found = [(call.name, _canonical(call.arguments)) for call in answer.tool_calls]
    wanted = [(name, _canonical(json.dumps(arguments))) for name, arguments in expected]
    return sorted(found, key=str) == sorted(wanted, key=str)
