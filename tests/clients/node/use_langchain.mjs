// LangChain on Node.

import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { check, CODE, MAX_TOKENS, model, report, url, valid } from "./report.mjs";

const size = z.object({ n: z.number().int().min(1).max(9), how: z.enum(["loop", "call"]) });
const chat = new ChatOpenAI({
  model,
  temperature: 0,
  apiKey: "none",
  maxTokens: MAX_TOKENS,
  maxRetries: 0,
  configuration: { baseURL: url },
});
const fibonacci = tool(() => "34", { name: "fibonacci", description: "The n-th number.", schema: size });

async function conversation(answer) {
  check(answer.tool_calls.length >= 1, "no calls");
  valid(answer.tool_calls[0].args);
  const results = answer.tool_calls.map((call) => new ToolMessage({ content: "34", tool_call_id: call.id }));
  await chat.bindTools([fibonacci]).invoke([new HumanMessage(CODE), answer, ...results]);
}

await report({
  chat: async () => check((await chat.invoke(CODE)).content, "no text"),
  stream: async () => {
    let pieces = 0;
    for await (const piece of await chat.stream(CODE)) pieces += piece.content ? 1 : 0;
    check(pieces > 2, `${pieces} pieces`);
  },
  tools: async () => conversation(await chat.bindTools([fibonacci], { tool_choice: "any" }).invoke(CODE)),
  tools_streamed: async () => {
    let whole = null;
    for await (const piece of await chat.bindTools([fibonacci], { tool_choice: "any" }).stream(CODE)) {
      whole = whole ? whole.concat(piece) : piece;
    }
    await conversation(whole);
  },
  structured: async () => valid(await chat.withStructuredOutput(size).invoke(CODE)),
});
