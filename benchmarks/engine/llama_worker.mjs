// llama.cpp, measured from inside: run in the directory where node-llama-cpp is installed.
//
//     node llama_worker.mjs <file.gguf>
//
// One JSON object per line: commands on stdin, answers on stdout (benchmarks/engine/programs.py lists the commands). A step
// is one token for each sequence of the batch, greedy, with no text made of it.

import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const here = createRequire(pathToFileURL(process.cwd() + "/").href);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(here.resolve("node-llama-cpp")).href);

const STEPS_MAX = 256;
const BATCH_TOKENS = 2048; // the longest prompt measured is one batch
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: process.argv[2]});
let context = null;
let sequences = [];
let streams = [];

const words = (count) => Array.from({length: count}, (_, index) => 1000 + ((index * 7919 + count) % 39000));

async function open(batch, tokens) {
    if (context != null) await context.dispose();
    context = await model.createContext({
        sequences: batch, contextSize: tokens + STEPS_MAX, batchSize: BATCH_TOKENS, threads: 1
    });
    sequences = Array.from({length: batch}, () => context.getSequence());
}

const commands = {
    async fill({batch, context: tokens}) {
        await open(batch, tokens);
        const prompt = words(tokens);
        for (const sequence of sequences) await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
        streams = sequences.map((sequence) => sequence.evaluate(prompt.slice(-1), {temperature: 0, yieldEogToken: true}));
        await Promise.all(streams.map((stream) => stream.next()));
        return {};
    },
    async keep({batch}) {
        await Promise.all(streams.slice(batch).map((stream) => stream.return()));
        streams = streams.slice(0, batch);
        return {};
    },
    async steps({count}) {
        const ms = [];
        for (let step = 0; step < count; step++) {
            const begun = performance.now();
            await Promise.all(streams.map((stream) => stream.next()));
            ms.push(performance.now() - begun);
        }
        return {ms};
    },
    async prefill({tokens}) {
        await open(1, tokens);
        const begun = performance.now();
        await sequences[0].evaluate(words(tokens), {temperature: 0}).next();
        return {ms: performance.now() - begun};
    }
};

process.stdout.write("{}\n"); // ready
for await (const line of createInterface({input: process.stdin})) {
    const command = JSON.parse(line);
    process.stdout.write(JSON.stringify(await commands[command.do](command)) + "\n");
}
process.exit(0);
