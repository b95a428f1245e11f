// Stream one answer of a chat over gRPC: node examples/node/grpc_client.js [host:port of a router]
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const root = fileURLToPath(new URL("../..", import.meta.url));
const definition = protoLoader.loadSync("protos/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  enums: String,
  longs: String,
  defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.TANDEM_API_KEY) metadata.set("authorization", `Bearer ${process.env.TANDEM_API_KEY}`);
const request = {
  chat: { messages: [{ role: "user", content: "Name three rivers." }] },
  sampling: { temperature: 0 },
  stop: { max_tokens: 24 },
};

try {
  for await (const response of client.Generate(request, metadata, { deadline: Date.now() + 60_000 })) {
    if (response.tokens) process.stdout.write(response.tokens.text);
    if (response.finished) {
      const { usage, finish_reason, path } = response.finished;
      console.log(`\n${usage.prompt_tokens} + ${usage.completion_tokens} tokens, ${finish_reason}, ${path}`);
    }
  }
} catch (error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
