// Stream a chat with OpenAI's client: node examples/node/openai_client.js [URL of a gateway]
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.TANDEM_API_KEY || "none" });
const model = (await client.models.list()).data[0].id;

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Name three rivers." }],
  max_completion_tokens: 24,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  if (chunk.usage) console.log(`\n${chunk.usage.prompt_tokens} + ${chunk.usage.completion_tokens} tokens of ${model}`);
}
