// Perfetto's trace processor in WebAssembly, outside of a browser: node trace_processor.js DIRECTORY < REQUESTS > REPLIES
//
// DIRECTORY has the files of Perfetto's user interface. Requests and replies are messages of its TraceProcessorRpcStream.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const directory = process.argv[2];

class XMLHttpRequest {  // how the engine reads its WebAssembly file
  open(method, url) {
    this.file = path.join(directory, path.basename(url));
  }
  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
}

// The engine expects to be a web worker, and refuses to run in node
globalThis.process = undefined;
Object.assign(globalThis, { self: globalThis, XMLHttpRequest, WorkerGlobalScope: class {}, importScripts() {} });
globalThis.location = { href: "file:///engine_bundle.js" };
console.log = console.info = console.warn = console.error;
vm.runInThisContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"));

const port = { postMessage: (reply) => fs.writeSync(1, reply) };
globalThis.onmessage({ data: port });
setImmediate(() => port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) })); // when the engine has started
