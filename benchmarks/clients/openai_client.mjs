// What a program with OpenAI's Node client does: `node openai_client.mjs URL MODEL`, with `openai` in OPENAI_MODULES.
// Each check prints one line. The program ends with status 1 at the first check that fails.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.env.OPENAI_MODULES + "/");
const { default: OpenAI } = await import(require.resolve("openai").replace(/\.js$/, ".mjs"));
const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { model, messages, max_completion_tokens: 16, temperature: 0 };
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", timeout: 120_000 });
const SETTLE_MS = 10_000;

async function metric(name) {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
  const found = lines.filter((line) => line.startsWith(`${name} `) || line.startsWith(`${name}{`));
  return found.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

const checks = {
  async models() {
    const listed = await client.models.list();
    assert.equal(listed.data[0].id, model);
    return model;
  },
  async streamedChat() {
    const whole = await client.chat.completions.create(options);
    const parts = [];
    for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
      parts.push(chunk.choices[0]?.delta?.content ?? "");
    }
    assert.equal(parts.join(""), whole.choices[0].message.content);
    assert.match(parts.join(""), /Paris/);
    return `${parts.length} chunks, the text of the answer that was not streamed`;
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object" } } }];
    try {
      const answer = await client.chat.completions.create({ ...options, tools });
      return `accepted, ended with ${answer.choices[0].finish_reason}`;
    } catch (error) {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.match(error.message, /tools/);
      return "refused by name: the chat template of this model knows no tools";
    }
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...options, model: "gpt-5" }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ ...options, temperature: 9000 }), OpenAI.BadRequestError);
    return "404 for a model, 400 for a field";
  },
  async retries() {
    const statuses = [];
    const flaky = new OpenAI({
      baseURL: `${url}/v1`, apiKey: "none",
      fetch: async (...call) => {
        const fails = statuses.length === 0;
        const answer = fails ? new Response("", { status: 503, headers: { "retry-after": "0" } }) : await fetch(...call);
        statuses.push(answer.status);
        return answer;
      },
    });
    await flaky.chat.completions.create({ ...options, max_completion_tokens: 2 });
    await assert.rejects(flaky.chat.completions.create({ ...options, model: "gpt-5" }));
    assert.deepEqual(statuses, [503, 200, 404]);
    return "a 503 is retried, a 404 is not";
  },
  async cancellation() {
    const before = await metric("tandem_gateway_client_disconnects_total");
    const stream = await client.chat.completions.create({
      ...options, max_completion_tokens: 4000, stream: true, ignore_eos: true,
    });
    for await (const chunk of stream) {
      assert.ok(chunk.id);
      stream.controller.abort();
      break;
    }
    const end = Date.now() + SETTLE_MS;
    while ((await metric("tandem_router_in_flight")) > 0 ||
        (await metric("tandem_gateway_client_disconnects_total")) === before) {
      assert.ok(Date.now() < end, "the request still runs");
      await sleep(50);
    }
    return "no request is left in the router";
  },
};

for (const [name, check] of Object.entries(checks)) {
  console.log(`${name}: ${await check()}`);
}
