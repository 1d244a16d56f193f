// Load a workflow into the real ComfyUI frontend and say what a user would see.
//
//   node browser.mjs JOB.json      prints one line of JSON
//
// JOB: server     origin of the server
//      workflow   path of a UI-format JSON, or
//      template   {pack, name}: fetched from the server as the templates dialog does
//      widgets    {"NodeType.widget": value}: set after loading, on every node of that type
//      queue      true: run it as the Run button does and wait for the end
//      shot       path of a PNG of the fitted graph;  shot_after  the same once it has run
//      reopen     true: drop the saved movie onto the editor after the run, and describe what it loads
//      shot_reopened  path of a PNG of that
//      settings   more of the user's settings, e.g. {"Comfy.VueNodes.Enabled": true} for the Nodes 2.0 drawing
//      timeout (ms), viewport [width, height]
import { createRequire } from 'node:module';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const require = createRequire(import.meta.url);
const { chromium } = require(process.env.PLAYWRIGHT_CORE || 'playwright-core');
const job = { timeout: 120000, viewport: [1920, 1200], widgets: {}, settings: {}, ...JSON.parse(readFileSync(process.argv[2])) };

// a sandboxed or closed network makes Chromium retry its own services without these
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', '--enable-unsafe-swiftshader'];

// without these a tutorial, a release note, the minimap or blurred text covers the graph
const SETTINGS = {
  'Comfy.TutorialCompleted': true, 'Comfy.InstalledVersion': '1.0.0', 'Comfy.Release.Status': 'skipped',
  'Comfy.Workflow.ShowMissingModelsWarning': false, 'Comfy.Minimap.Visible': false,
  'LiteGraph.Canvas.MinFontSizeForLOD': 0, 'Comfy.VueNodes.Enabled': false, 'Comfy.Locale': 'en',
  ...job.settings,
};

// files of a user who has never customised anything
const USUAL_404 = [/\/user\.css$/, /\/userdata\?dir=/, /\/userdata\/comfy\.templates\.json$/];

const seen = { console_errors: [], page_errors: [], bad_responses: [], prompts: [] };

async function watch(page) {
  const home = new URL(job.server).origin;
  await page.route('**/*', route => {
    const url = new URL(route.request().url());
    return url.origin === home || ['data:', 'blob:'].includes(url.protocol) ? route.continue() : route.abort();
  });
  page.on('pageerror', error => seen.page_errors.push(String(error).slice(0, 300)));
  page.on('console', message => {
    const text = message.text();  // failed loads are counted below, with their address
    if (message.type() === 'error' && !text.startsWith('Failed to load resource')) seen.console_errors.push(text.slice(0, 300));
  });
  page.on('response', async response => {
    const url = response.url().replace(home, '');
    if (response.status() >= 400 && !USUAL_404.some(usual => usual.test(url))) seen.bad_responses.push(`${response.status()} ${url}`);
    if (url.endsWith('/prompt') && response.request().method() === 'POST') {
      seen.prompts.push({ status: response.status(), answer: await response.json().catch(() => null) });
    }
  });
}

async function load(page) {
  let workflow = job.workflow && JSON.parse(readFileSync(job.workflow));
  if (job.template) {
    workflow = await page.evaluate(async ({ pack, name }) => {
      const response = await fetch(pack === 'default' ? `/templates/${name}.json` : `/api/workflow_templates/${pack}/${name}.json`);
      if (!response.ok) throw new Error(`template ${pack}/${name}: ${response.status}`);
      return response.json();
    }, job.template);
  }
  if (!workflow) return;
  await page.evaluate(w => window.app.loadGraphData(w, true, true, 'loaded'), workflow);
  await page.waitForFunction(n => (window.app.rootGraph || window.app.graph)._nodes.length === n, workflow.nodes.length);
}

const setWidgets = (page) => page.evaluate(values => {
  for (const node of (window.app.rootGraph || window.app.graph)._nodes) {
    for (const widget of node.widgets || []) {
      const key = `${node.type}.${widget.name}`;
      if (key in values) { widget.value = values[key]; widget.callback?.(widget.value); }
    }
  }
}, job.widgets);

const describe = (page) => page.evaluate(() => {
  const graph = window.app.rootGraph || window.app.graph;
  const virtual = ['Note', 'MarkdownNote', 'Reroute', 'PrimitiveNode'];
  return {
    version: window.__COMFYUI_FRONTEND_VERSION__,
    links: [...graph.links.values()].length,
    nodes: graph._nodes.map(node => ({
      id: String(node.id), type: node.type, title: node.title,
      missing: !virtual.includes(node.type) && !node.subgraph && !window.LiteGraph.registered_node_types[node.type],
      box: [...node.boundingRect],
      inputs: (node.inputs || []).map(slot => [slot.name, slot.link != null]),
      widgets: Object.fromEntries((node.widgets || []).map(w => [w.name, typeof w.value === 'object' ? null : w.value])),
      // a note that needs scrolling is not read
      hidden_text: Math.max(0, ...(node.widgets || []).map(w => w.element ? w.element.scrollHeight - w.element.clientHeight : 0)),
    })),
    groups: (graph._groups || []).map(group => ({ title: group.title, box: [...group._bounding] })),
  };
});

async function fit(page) {
  await page.evaluate(async () => {
    await window.app.extensionManager.command.execute('Comfy.Canvas.FitView');
    window.app.canvas.setDirty(true, true);
  });
  await page.waitForTimeout(900);  // the view moves there
}

const run = (page) => page.evaluate(async timeout => {
  const { api } = window.app;
  const began = performance.now();
  const ended = new Promise(resolve => {
    for (const status of ['execution_success', 'execution_error', 'execution_interrupted']) {
      api.addEventListener(status, event => resolve({ status, detail: event.detail }), { once: true });
    }
    setTimeout(() => resolve({ status: 'timeout' }), timeout);
  });
  if (await window.app.queuePrompt(0, 1) === false) return { status: 'rejected', detail: window.app.lastNodeErrors };
  return { ...await ended, seconds: (performance.now() - began) / 1000 };
}, job.timeout);

async function reopen(page, outputs) {
  const movie = Object.values(outputs).flatMap(ui => ui.images || []).find(item => item.filename.endsWith('.mp4'));
  await page.evaluate(() => window.app.graph.clear());
  await page.evaluate(async ({ filename, subfolder, type }) => {
    const response = await fetch(`/api/view?${new URLSearchParams({ filename, subfolder, type })}`);
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([await response.blob()], filename, { type: 'video/mp4' }));
    for (const name of ['dragover', 'drop']) {
      document.querySelector('canvas').dispatchEvent(
        new DragEvent(name, { dataTransfer, bubbles: true, cancelable: true, clientX: 900, clientY: 600 }));
    }
  }, movie);
  await page.waitForFunction(() => (window.app.rootGraph || window.app.graph)._nodes.length > 0);
  await page.waitForTimeout(800);
  if (job.shot_reopened) { await fit(page); await page.screenshot({ path: job.shot_reopened }); }
  return describe(page);
}

async function main(context) {
  const page = context.pages()[0] || await context.newPage();
  await watch(page);
  for (const [key, value] of Object.entries(SETTINGS)) {
    await context.request.post(`${job.server}/settings/${key}`, { data: JSON.stringify(value), headers: { 'content-type': 'application/json' } });
  }
  const types = Object.keys(await (await context.request.get(`${job.server}/object_info`)).json());
  const began = Date.now();
  await page.goto(job.server, { waitUntil: 'domcontentloaded', timeout: job.timeout });
  await page.waitForFunction(all => window.app?.graph && window.app.extensionManager && !window.app.extensionManager.spinner
    // a few may be hidden in the editor
    && all.filter(type => window.LiteGraph?.registered_node_types[type]).length > 0.9 * all.length, types, { timeout: job.timeout });
  const result = { ready_ms: Date.now() - began };
  await load(page);
  await setWidgets(page);
  await page.waitForTimeout(600);  // dialogs open after the graph is drawn
  result.dialogs = await page.evaluate(() => [...document.querySelectorAll('[role=dialog]')].map(d => d.innerText.slice(0, 400)));
  await fit(page);
  result.graph = await describe(page);
  result.missing = result.graph.nodes.filter(node => node.missing).map(node => node.type);
  if (job.shot) await page.screenshot({ path: job.shot });
  result.api = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
  if (job.queue) {
    result.run = await run(page);
    const id = result.run.detail?.prompt_id;
    if (id) result.outputs = (await (await context.request.get(`${job.server}/history/${id}`)).json())[id]?.outputs;
    await page.waitForTimeout(1500);  // previews load, and nodes grow by what they show
    result.graph_after = await describe(page);
    if (job.shot_after) await page.screenshot({ path: job.shot_after });
    if (job.reopen) result.reopened = await reopen(page, result.outputs);
  }
  return result;
}

const profile = mkdtempSync(join(tmpdir(), 'fasth3-chromium-'));
const context = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium', headless: true, args: FLAGS,
  viewport: { width: job.viewport[0], height: job.viewport[1] },
});
let result;
try {
  result = await main(context);
} catch (error) {
  result = { exception: String(error.stack || error).slice(0, 1500) };
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
}
console.log(JSON.stringify({ ...seen, ...result }));
