// Answers queries as the site does, by the theme's own search worker: node search.js SITE < queries
const fs = require("fs"), path = require("path"), readline = require("readline")

const site = process.argv[2], folder = path.join(site, "assets/javascripts/workers")
const handlers = [], waiting = []
Object.assign(globalThis, {
  self: globalThis,
  addEventListener: (kind, handler) => handlers.push(handler),
  postMessage: message => waiting.shift()(message),
  importScripts: () => {},
})
const worker = fs.readdirSync(folder).find(name => /^search.*\.js$/.test(name))
new Function(fs.readFileSync(path.join(folder, worker), "utf8"))()

const ask = message => new Promise(resolve => {
  waiting.push(resolve)
  handlers[0]({ data: message })
})

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")))
  await ask({ type: 0, data: { ...index, options: { suggest: true } } })
  for await (const query of readline.createInterface({ input: process.stdin })) {
    const answer = await ask({ type: 2, data: query })
    console.log(JSON.stringify(answer.data.items.map(group => group[0].location)))
  }
}
main()
