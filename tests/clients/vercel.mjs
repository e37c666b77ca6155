// Vercel's AI SDK with its two providers for servers that speak OpenAI's API.
// Run by test_vercel.py; by hand: K3LIB_URL=http://127.0.0.1:PORT/v1 K3LIB_MODEL=NAME node --test vercel.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { K3LIB_URL: baseURL, K3LIB_MODEL: name } = process.env;
const compatible = createOpenAICompatible({
  name: "k3lib",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });

const tools = {
  get_weather: tool({
    description: "Tell the weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `21 degrees in ${city}`,
  }),
};
const greeting = { prompt: "Say hi.", maxRetries: 0 };
const weather = { prompt: "How is the weather in Paris and in Rome?", tools, stopWhen: stepCountIs(3), maxRetries: 0 };
const person = z.object({ name: z.string(), age: z.number() });

for (const [provider, model] of [
  ["compatible", compatible.chatModel(name)],
  ["openai", openai.chat(name)],
]) {
  const showsReasoning = provider === "compatible";

  test(`${provider}: text`, async () => {
    const { text, reasoningText, usage, finishReason } = await generateText({ model, temperature: 0.5, seed: 1, ...greeting });
    assert.equal(text, "Hello! How can I help?");
    assert.equal(finishReason, "stop");
    assert.equal(usage.inputTokenDetails.cacheReadTokens, 4);
    assert.ok(usage.outputTokenDetails.reasoningTokens > 0);
    if (showsReasoning) assert.equal(reasoningText, "They greet me.");
  });

  test(`${provider}: stream`, async () => {
    const result = streamText({ model, ...greeting });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.ok(pieces.length > 3);
    assert.equal(pieces.join(""), "Hello! How can I help?");
    assert.ok((await result.usage).outputTokens > 0);
    if (showsReasoning) assert.equal(await result.reasoningText, "They greet me.");
  });

  test(`${provider}: tools`, async () => {
    const { text, steps } = await generateText({ model, ...weather });
    assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ city: "Paris" }, { city: "Rome" }]);
    assert.equal(text, "It is 21 degrees in Paris.");
  });

  test(`${provider}: tools, streamed`, async () => {
    const result = streamText({ model, ...weather });
    let pieces = 0;
    for await (const part of result.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      if (part.type === "tool-input-delta") pieces += 1;
    }
    const [first] = await result.steps;
    assert.deepEqual(first.toolCalls.map((call) => call.input), [{ city: "Paris" }, { city: "Rome" }]);
    assert.ok(pieces >= 2);
    assert.equal(await result.text, "It is 21 degrees in Paris.");
  });

  test(`${provider}: objects`, async () => {
    const asked = { model, prompt: "Ada is 36 years old.", output: Output.object({ schema: person }), maxRetries: 0 };
    assert.deepEqual((await generateText(asked)).output, { name: "Ada", age: 36 });
    const parts = [];
    for await (const part of streamText(asked).partialOutputStream) parts.push(part);
    assert.deepEqual(parts.at(-1), { name: "Ada", age: 36 });
  });
}

test("errors have types", async () => {
  for (const provider of [compatible.chatModel("another"), openai.chat("another")]) {
    const error = await generateText({ model: provider, ...greeting }).catch((caught) => caught);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /does not exist/);
  }
  const error = await embed({ model: openai.embedding("another"), value: "a", maxRetries: 0 }).catch((caught) => caught);
  assert.equal(error.statusCode, 404);
  assert.match(error.message, /embeddings/);
});
