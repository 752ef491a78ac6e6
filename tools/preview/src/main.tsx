// Draws one committed board over a real Prometheus, with Grafana's own libraries where they exist.
// The address says which: ?board=<uid>&theme=dark|light&from=now-6h&to=now&var-node=...&open=1
import { EventBusSrv, LoadingState, type PanelData, createTheme, setLocale } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import {
  config,
  setAppEvents,
  setPluginImportUtils,
  setRunRequest,
  setTemplateSrv,
} from '@grafana/runtime';
import { GlobalStyles, PortalContainer, ThemeContext } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';
import { type Observable, catchError, concat, finalize, map, of } from 'rxjs';
import { scene } from './board';
import { registerFields } from './fields';
import { heatmap } from './panels/heatmap';
import { table } from './panels/table';
import { logs, text } from './panels/texts';
import { statetimeline, statushistory } from './panels/timelines';
import { timeseries } from './panels/timeseries';
import { bargauge, gauge, stat } from './panels/values';

const PLUGINS: Record<string, any> = {
  stat,
  gauge,
  bargauge,
  timeseries,
  table,
  heatmap,
  text,
  logs,
  'state-timeline': statetimeline,
  'status-history': statushistory,
};

const words = new URLSearchParams(location.search);
const theme = createTheme({ colors: { mode: words.get('theme') === 'light' ? 'light' : 'dark' } });

let asked = 0;
let drawn = false;
const failed: string[] = [];
// A picture is taken when nothing is being asked and nothing was drawn for some frames, and never of
// a panel that failed.
const STILL_FRAMES = 30;
let still = 0;
new MutationObserver(() => {
  still = 0;
}).observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
function count() {
  still += 1;
  requestAnimationFrame(count);
}
count();
const settled = () => drawn && asked === 0 && still > STILL_FRAMES;
Object.assign(window, { preview: { settled, failed } });

function run(source: any, request: any): Observable<PanelData> {
  const state = { series: [], timeRange: request.range, request };
  asked += 1;
  // also when nobody waits for the answer any more: a variable has changed meanwhile
  const counted = finalize(() => {
    asked -= 1;
  });
  return concat<[PanelData, PanelData]>(
    of({ ...state, state: LoadingState.Loading } as PanelData),
    source.query(request).pipe(
      map((answer: any) => ({ ...state, series: answer.data, state: LoadingState.Done })),
      catchError((error: Error) => {
        failed.push(error.message);
        return of({ ...state, state: LoadingState.Error, errors: [{ message: error.message }] });
      })
    )
  ).pipe(counted as any);
}

// Grafana's addresses give moments in milliseconds.
function moment(text: string): string {
  return /^\d+$/.test(text) ? new Date(Number(text)).toISOString() : text;
}

async function start() {
  const board = await (await fetch(`boards/${words.get('board')}.json`)).json();
  await initPluginTranslations('grafana', []);
  setLocale('en-GB');
  config.theme2 = theme;
  (config as any).featureToggles = {};
  registerFields();
  setAppEvents(new EventBusSrv());
  setRunRequest(run as any);
  setTemplateSrv({
    getVariables: () => [],
    replace: (given: string) => given,
    containsTemplate: () => false,
    updateTimeRange: () => undefined,
  } as any);
  setPluginImportUtils({
    importPanelPlugin: async (id) => PLUGINS[id],
    getPanelPluginFromCache: (id) => PLUGINS[id],
  });
  for (const [id, plugin] of Object.entries(PLUGINS)) {
    plugin.meta = { ...plugin.meta, id, name: id, info: { version: '' } };
  }

  const values: Record<string, string[]> = {};
  for (const [name, value] of words) {
    if (name.startsWith('var-')) {
      (values[name.slice(4)] ??= []).push(value);
    }
  }
  const shown = await scene(board, {
    from: moment(words.get('from') ?? board.time?.from ?? 'now-6h'),
    to: moment(words.get('to') ?? board.time?.to ?? 'now'),
    values,
    open: words.get('open') === '1',
  });
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <BrowserRouter>
        <GlobalStyles />
        <shown.Component model={shown} />
        <PortalContainer />
      </BrowserRouter>
    </ThemeContext.Provider>
  );
  drawn = true;
}

start().catch((error: Error) => {
  failed.push(error.message);
  throw error;
});
