// The AI SDK with its provider for servers like OpenAI's, and with the one for OpenAI itself.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { check, CODE, MAX_TOKENS, model, report, url, valid } from "./report.mjs";

const size = z.object({ n: z.number().int().min(1).max(9), how: z.enum(["loop", "call"]) });
// Without the flag it asks for any JSON, and leaves the schema to the prompt.
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL: url, supportsStructuredOutputs: true });
const providers = { compatible: compatible(model), chat: openai.chat(model), responses: openai(model) };

const asked = (one) => ({ model: one, prompt: CODE, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0, onError: () => {} });

/** The first step must call; its result goes back, and the second step is free. */
function calling(one, seen) {
  const fibonacci = tool({
    description: "The n-th number.",
    inputSchema: size,
    execute: async (given) => {
      seen.push(given);
      return 34;
    },
  });
  return {
    ...asked(one),
    tools: { fibonacci },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
    stopWhen: stepCountIs(2),
  };
}

function tries(name, one) {
  return {
    [`${name}_chat`]: async () => check((await generateText(asked(one))).text, "no text"),
    [`${name}_stream`]: async () => {
      let pieces = 0;
      for await (const piece of streamText(asked(one)).fullStream) {
        if (piece.type === "error") throw piece.error;
        if (piece.type === "text-delta") pieces += 1;
      }
      check(pieces > 2, `${pieces} pieces`);
    },
    [`${name}_tools`]: async () => {
      const seen = [];
      const { steps } = await generateText(calling(one, seen));
      check(steps.length === 2 && seen.length >= 1, `${steps.length} steps, ${seen.length} calls`);
      valid(seen[0]);
    },
    [`${name}_tools_streamed`]: async () => {
      const seen = [];
      for await (const piece of streamText(calling(one, seen)).fullStream) {
        if (piece.type === "error") throw piece.error;
      }
      check(seen.length >= 1, "no calls");
      valid(seen[0]);
    },
    [`${name}_structured`]: async () => valid((await generateObject({ ...asked(one), schema: size })).object),
    [`${name}_structured_streamed`]: async () => {
      let found;
      for await (const partial of streamObject({ ...asked(one), schema: size }).partialObjectStream) found = partial;
      valid(found);
    },
  };
}

await report(Object.assign({}, ...Object.entries(providers).map(([name, one]) => tries(name, one))));
