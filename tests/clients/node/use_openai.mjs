// OpenAI's own client on Node.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, CODE, MAX_TOKENS, model, report, url, valid } from "./report.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const size = z.object({ n: z.number().int().min(1).max(9), how: z.enum(["loop", "call"]) });
const asked = { model, temperature: 0, max_tokens: MAX_TOKENS, messages: [{ role: "user", content: CODE }] };
const seen = [];
const fibonacci = {
  type: "function",
  function: {
    name: "fibonacci",
    description: "The n-th number.",
    parameters: z.toJSONSchema(size),
    parse: JSON.parse,
    function: (given) => {
      seen.push(given);
      return "34";
    },
  },
};

await report({
  chat: async () => check((await client.chat.completions.create(asked)).choices[0].message.content, "no text"),
  stream: async () => {
    let text = "";
    for await (const piece of await client.chat.completions.create({ ...asked, stream: true })) {
      text += piece.choices[0]?.delta?.content ?? "";
    }
    check(text, "no text");
  },
  tools: async () => {
    const tools = [{ type: "function", function: { name: "fibonacci", parameters: z.toJSONSchema(size) } }];
    const answer = await client.chat.completions.create({ ...asked, tools, tool_choice: "required" });
    valid(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  tools_run: async () => {
    // Its helper takes an answer that was cut off for an error, so a line is enough.
    const wanted = { ...asked, stop: "\n", tools: [fibonacci] };
    await client.chat.completions.runTools(wanted, { maxChatCompletions: 2 }).done();
  },
  tools_streamed: async () => {
    const tools = [{ type: "function", function: { name: "fibonacci", parameters: z.toJSONSchema(size) } }];
    const stream = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    valid(JSON.parse(message.tool_calls[0].function.arguments));
  },
  structured: async () => {
    const answer = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(size, "size") });
    valid(answer.choices[0].message.parsed);
  },
  responses: async () => {
    const answer = await client.responses.create({ model, input: CODE, max_output_tokens: MAX_TOKENS });
    check(answer.output_text, "no text");
  },
});
