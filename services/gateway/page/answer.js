// Requests an answer: chooses the messages to send, collects the text, and writes the note below it.

import { speed } from "/page/live.js";
import { ask, events, failure } from "/page/server.js";
import { keep, kept } from "/page/storage.js";

const DEMO = "neuronpipe-demo";
const BASE_TOKENS = 200; // limit of an answer, as in the terminal, since a base model does not end by itself
const ANSWER_SHARE = 1 / 4; // of the context, reserved for an answer without a token limit

let models = null; // [{ name, chat, context }]; null until they are fetched
let chosenName = kept("model");

// Returns the server's models, the default first. Raises an error if the server does not answer.
export async function all() {
  if (models) return models;
  const response = await ask("/v1/models");
  if (!response.ok) throw await failure(response);
  const { data } = await response.json();
  models = data.map(({ id, chat_template: chat, context_tokens: context }) => ({ name: id, chat, context }));
  return models;
}

// Returns the model that answers: the chosen one, or the first.
export async function describe() {
  const there = await all();
  return there.find(({ name }) => name === chosenName) ?? there[0];
}

// Returns why the chat template of a model fails; "" if it works, or the server does not say.
export async function templateError(name) {
  const response = await ask(`/props?model=${encodeURIComponent(name)}`);
  return response.ok ? ((await response.json()).chat_template_error ?? "") : "";
}

export function choose(name) {
  chosenName = name;
  keep("model", name);
}

// Returns the default token limit of an answer; null means as many as fit the context.
export function defaultTokens(chat) {
  return chat ? null : BASE_TOKENS;
}

// Returns what a model is, in a sentence or two, for a person who has never used one.
export function introduction(name, chat) {
  if (chat) return `${name} is a chat model: it was trained to answer. What it says can be wrong.`;
  const base = `${name} is a base model: it was not trained for chat, and continues the text that you send.`;
  return name === DEMO ? `${base} This small demo knows only Python code.` : base;
}

// Returns advice for a person who has only the demo. The name is FIRST_MODEL of plans/pull/package_library.py.
export function advice(name) {
  if (name !== DEMO) return "";
  return "A small model that answers: neuronpipe pull qwen3-0.6b (640 MB), then neuronpipe serve qwen3-0.6b.";
}

// Appends the text of an answer to a turn as it arrives, and writes its note. came: called after each piece of text.
// prepared: called before each request, when the model and the messages are known.
export async function answer(conversation, turn, chosen, signal, came, prepared) {
  const { name, chat, context } = await describe();
  Object.assign(turn, { model: name, chat });
  const { sent, response } = await request(conversation, chosen, { name, chat, context }, signal, prepared);
  const before = turn.tokens;
  let first = 0, reason = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      turn.tokens = before + event.usage.completion_tokens;
      conversation.counted(sent, event.usage.prompt_tokens);
    }
    for (const choice of event.choices) {
      const { content = "", reasoning_content: thought = "" } = choice.delta ?? {};
      if (content || thought) {
        first ||= performance.now();
        turn.answer += content ?? "";
        turn.thought += thought ?? "";
        came();
      }
      reason = choice.finish_reason || reason;
    }
  }
  if (!reason) throw new Error("the connection ended before the answer did");
  const seconds = (performance.now() - first) / 1000;
  const fast = turn.tokens - before > 1 && seconds > 0 ? `, ${speed((turn.tokens - before - 1) / seconds)} tokens/s` : "";
  const unsent = conversation.leftOut ? `; the oldest ${2 * conversation.leftOut} messages were left out` : "";
  turn.reason = reason;
  const ending = reason === "length" ? "token limit reached" : "ended";
  turn.note = `${turn.tokens} ${turn.tokens === 1 ? "token" : "tokens"}${fast}, ${ending}${unsent}`;
}

// Sends the messages that fit. Only the server can count tokens: if it refuses them as too long, one turn less is sent.
async function request(conversation, { system, temperature, penalty, tokens }, { name, chat, context }, signal, prepared) {
  const most = tokens ?? defaultTokens(chat);
  conversation.fit(system, context - Math.min(most ?? ANSWER_SHARE * context, context / 2));
  for (;;) {
    prepared();
    const messages = conversation.sent(system);
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal,
      body: JSON.stringify({
        model: name,
        messages,
        continue_final_message: messages.at(-1).role === "assistant",
        stream: true,
        temperature,
        repetition_penalty: penalty,
        max_tokens: most ?? undefined,
        stream_options: { include_usage: true },
      }),
    });
    if (response.ok) return { sent: messages, response };
    const problem = await failure(response);
    if (problem.code !== "context_length_exceeded" || !conversation.leaveOut()) throw problem;
  }
}
