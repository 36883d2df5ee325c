// Ollama's own client on Node.

import { Ollama } from "ollama";
import { check, CODE, MAX_TOKENS, model, report, url, valid } from "./report.mjs";

const client = new Ollama({ host: url.replace(/\/v1$/, "") });
const size = {
  type: "object",
  properties: { n: { type: "integer", minimum: 1, maximum: 9 }, how: { type: "string", enum: ["loop", "call"] } },
  required: ["n", "how"],
};
const options = { temperature: 0, num_predict: MAX_TOKENS };
const asked = { model, options, messages: [{ role: "user", content: CODE }] };
const tools = [{ type: "function", function: { name: "fibonacci", description: "A number.", parameters: size } }];

/** Text may only be one object here, and almost any token that may come is sampled: a call comes soon. */
async function called() {
  for (let seed = 0; seed < 40; seed++) {
    const often = { temperature: 100, top_p: 1, top_k: 0, seed, num_predict: 200 };
    const answer = await client.chat({ ...asked, tools, format: { const: {} }, options: often });
    if (answer.message.tool_calls) return answer.message;
  }
  throw new Error("no call");
}

await report({
  chat: async () => {
    const answer = await client.chat(asked);
    check(answer.message.content, "no text");
    check(answer.total_duration >= answer.eval_duration && answer.eval_duration > 0, "no durations");
  },
  stream: async () => {
    let text = "";
    let last;
    for await (const piece of await client.chat({ ...asked, stream: true })) {
      text += piece.message.content;
      last = piece;
    }
    check(text === (await client.chat(asked)).message.content, "another text");
    check(last.done && last.eval_count > 0, "no last object");
  },
  generate: async () => {
    check((await client.generate({ model, prompt: CODE, raw: true, options })).response, "no text");
    let pieces = 0;
    for await (const piece of await client.generate({ model, prompt: CODE, options, stream: true })) pieces += !piece.done;
    check(pieces > 1, "no pieces");
  },
  tools: async () => {
    const message = await called();
    valid(message.tool_calls[0].function.arguments);
    const result = { role: "tool", tool_name: "fibonacci", content: "34" };
    const more = await client.chat({ ...asked, messages: [...asked.messages, message, result], tools });
    check(more.done, "not done");
  },
  structured: async () => valid(JSON.parse((await client.chat({ ...asked, format: size })).message.content)),
  models: async () => {
    const name = `${model}:latest`;
    check((await client.list()).models[0].name === name, "not listed");
    check((await client.ps()).models[0].name === name, "not running");
    check((await client.show({ model: name })).capabilities.includes("tools"), "no tools");
    check((await client.version()).version, "no version");
  },
  refused: async () => {
    const error = await client.chat({ ...asked, model: "other" }).catch((failure) => failure);
    check(error.status_code === 404 && error.error.includes("not found"), `${error}`);
  },
});
