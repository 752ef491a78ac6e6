// A data source that speaks Prometheus's HTTP API and does with a query what Grafana's own does:
// macros, aligned steps, legends, tables, histogram buckets. Grafana's is AGPL, so this is ours.
import {
  type DataFrame,
  type DataQueryRequest,
  type DataQueryResponse,
  FieldType,
  LoadingState,
  type MetricFindValue,
  type ScopedVars,
  type TimeRange,
  rangeUtil,
} from '@grafana/data';
import { RuntimeDataSource, sceneGraph } from '@grafana/scenes';
import { type Observable, from } from 'rxjs';

export const SCRAPE_SECONDS = 15; // what Grafana assumes while a data source names no interval
const MOST_POINTS = 11_000; // Prometheus refuses more

type Labels = Record<string, string>;
interface Series {
  metric: Labels;
  values: Array<[number, string]>;
}
export interface Query {
  refId: string;
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  format?: string;
  interval?: string;
  hide?: boolean;
  maxLines?: number;
}

export class Prometheus extends RuntimeDataSource {
  interval = `${SCRAPE_SECONDS}s`;
  // Annotation queries keep their expression beside their settings, not in a target.
  annotations = { prepareQuery: (anno: any) => ({ ...anno, refId: 'Anno' }) };

  query(request: DataQueryRequest<any>): Observable<DataQueryResponse> {
    const shown = (request.targets as Query[]).filter((target) => !target.hide);
    const many = shown.length > 1;
    return from(
      Promise.all(shown.map((target) => this.frames(target, request, many))).then((frames) => ({
        data: frames.flat(),
        state: LoadingState.Done,
      }))
    );
  }

  async metricFindQuery(query: any, options?: any): Promise<MetricFindValue[]> {
    const text = typeof query === 'string' ? query : (query.query ?? query.expr);
    const range: TimeRange = options.range;
    const bounds = { start: seconds(range.from), end: seconds(range.to) };
    const resolved = interpolate(text, options.scopedVars);
    const labelled = /^label_values\((?:(.+),\s*)?(\w+)\)$/.exec(resolved);
    if (labelled) {
      const [, selector, label] = labelled;
      const words = selector ? { ...bounds, 'match[]': selector } : bounds;
      const names: string[] = await ask(`/api/v1/label/${label}/values`, words);
      return names.map((name) => ({ text: name }));
    }
    const asked = /^query_result\((.+)\)$/s.exec(resolved);
    if (!asked) {
      throw new Error(`the preview knows no variable query like ${text}`);
    }
    const { result } = await ask('/api/v1/query', { query: asked[1], time: bounds.end });
    return result.map((one: any) => ({ text: `${named(one.metric)} ${one.value[1]}` }));
  }

  private async frames(target: Query, request: DataQueryRequest<any>, many: boolean) {
    const range = request.range;
    const step = stepOf(target, request);
    const query = interpolate(target.expr, macros(request, step));
    const anno = target as any;
    const every = anno.titleFormat !== undefined || anno.step ? period(anno.step ?? '60s') : step;
    let series: Series[];
    if (target.instant) {
      const words = { query, time: seconds(range.to) };
      const { result } = await ask('/api/v1/query', words);
      series = result.map((one: any) => ({ metric: one.metric, values: [one.value] }));
    } else {
      // Grafana asks at multiples of the step, so that a refresh does not shift every point.
      const start = Math.floor(seconds(range.from) / every) * every;
      const end = Math.floor(seconds(range.to) / every) * every;
      const { result } = await ask('/api/v1/query_range', { query, start, end, step: every });
      series = result;
      if (anno.titleFormat !== undefined) {
        return [events(series, anno)];
      }
      if (target.format === 'heatmap') {
        return buckets(series, target, grid(start, end, every));
      }
      if (target.format !== 'table') {
        return series.map((one) => line(one, target, grid(start, end, every)));
      }
    }
    return target.format === 'table'
      ? [table(series, target, many)]
      : series.map((one) => line(one, target));
  }
}

async function ask(path: string, words: Record<string, string | number>): Promise<any> {
  const body = new URLSearchParams(Object.entries(words).map(([key, value]) => [key, `${value}`]));
  const answer = await fetch(`prometheus${path}?${body}`);
  const said = await answer.json();
  if (said.status !== 'success') {
    throw new Error(`${said.error}: ${words.query ?? path}`);
  }
  return said.data;
}

export function interpolate(text: string, scoped: ScopedVars = {}): string {
  const about = (scoped.__sceneObject as any)?.value?.valueOf();
  return sceneGraph.interpolate(about, text, scoped, (value: any, variable: any) => {
    if (!variable.multi && !variable.isMulti && !variable.includeAll) {
      return `${value}`.replace(/[\\']/g, '\\$&');
    }
    const words = (Array.isArray(value) ? value : [value]).map((one) =>
      `${one}`.replace(/\\/g, '\\\\\\\\').replace(/[$^*{}[\]'+?.()|]/g, '\\\\$&')
    );
    return words.length === 1 ? words[0] : `(${words.join('|')})`;
  });
}

function stepOf(target: Query, request: DataQueryRequest<any>): number {
  const least = target.interval ? period(interpolate(target.interval, request.scopedVars)) : 0;
  const span = seconds(request.range.to) - seconds(request.range.from);
  return Math.max(
    request.intervalMs / 1000,
    least || SCRAPE_SECONDS,
    Math.ceil(span / MOST_POINTS)
  );
}

function macros(request: DataQueryRequest<any>, step: number): ScopedVars {
  const span = Math.round(seconds(request.range.to) - seconds(request.range.from));
  const words: Record<string, string | number> = {
    __interval: `${step}s`,
    __interval_ms: step * 1000,
    __rate_interval: `${Math.max(step + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)}s`,
    __range: `${span}s`,
    __range_s: span,
    __range_ms: span * 1000,
  };
  const found: ScopedVars = { ...request.scopedVars };
  for (const [name, value] of Object.entries(words)) {
    found[name] = { text: `${value}`, value };
  }
  return found;
}

function seconds(time: { valueOf(): number }): number {
  return time.valueOf() / 1000;
}

function period(text: string): number {
  return rangeUtil.intervalToSeconds(text);
}

function grid(start: number, end: number, step: number): number[] {
  const found: number[] = [];
  for (let time = start; time <= end; time += step) {
    found.push(time);
  }
  return found;
}

function number(text: string): number {
  return text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text);
}

function named(labels: Labels): string {
  const { __name__: name = '', ...rest } = labels;
  const words = Object.entries(rest).map(([key, value]) => `${key}="${value}"`);
  return words.length ? `${name}{${words.join(', ')}}` : name;
}

function legend(labels: Labels, target: Query): string {
  const format = target.legendFormat ?? '';
  if (format && format !== '__auto') {
    return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, name) => labels[name] ?? name);
  }
  return named(labels) || target.expr;
}

// A range answer has no samples where there were none: the gaps are put in, or lines would cross.
function line(series: Series, target: Query, times?: number[]): DataFrame {
  const known = new Map(series.values.map(([time, value]) => [time, number(value)]));
  const at = times ?? [...known.keys()];
  const { __name__: _, ...labels } = series.metric;
  const name = legend(series.metric, target);
  return {
    refId: target.refId,
    length: at.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: at.map((time) => time * 1000) },
      {
        name: 'Value',
        type: FieldType.number,
        config: { displayNameFromDS: name },
        labels,
        values: at.map((time) => known.get(time) ?? null),
      },
    ],
  };
}

function table(series: Series[], target: Query, many: boolean): DataFrame {
  const names = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  const cells = series.flatMap((one) =>
    one.values.map(([time, value]) => ({ time, value, labels: one.metric }))
  );
  return {
    refId: target.refId,
    length: cells.length,
    fields: [
      {
        name: 'Time',
        type: FieldType.time,
        config: {},
        values: cells.map((cell) => cell.time * 1000),
      },
      ...names.map((name) => ({
        name,
        type: FieldType.string,
        config: { filterable: true },
        values: cells.map((cell) => cell.labels[name] ?? ''),
      })),
      {
        name: many ? `Value #${target.refId}` : 'Value',
        type: FieldType.number,
        config: {},
        values: cells.map((cell) => number(cell.value)),
      },
    ],
  };
}

// Buckets are cumulative: each is told as what it has more than the one below.
function buckets(series: Series[], target: Query, times: number[]): DataFrame[] {
  const sorted = [...series].sort((a, b) => number(a.metric.le) - number(b.metric.le));
  const lines = sorted.map((one) => line(one, target, times));
  const values = lines.map((one) => one.fields[1].values as Array<number | null>);
  return lines.map((one, place) => {
    const below = place ? values[place - 1] : undefined;
    const own = values[place].map((value, at) =>
      value === null ? null : Math.max(0, value - (below?.[at] ?? 0))
    );
    const field = { ...one.fields[1], values: own };
    field.config = { ...field.config, displayNameFromDS: sorted[place].metric.le };
    return { ...one, name: sorted[place].metric.le, fields: [one.fields[0], field] };
  });
}

// Neighbouring samples of one series are one event: its first moment is marked.
function events(series: Series[], anno: any): DataFrame {
  const gap = period(anno.step ?? '60s') * 1.5;
  const found: Array<{ time: number; title: string }> = [];
  for (const one of series) {
    let before = -Infinity;
    for (const [time, value] of one.values) {
      if (number(value) > 0) {
        if (time - before > gap) {
          found.push({ time: time * 1000, title: legendOf(anno, one.metric) });
        }
        before = time;
      }
    }
  }
  return {
    length: found.length,
    fields: [
      { name: 'time', type: FieldType.time, config: {}, values: found.map((one) => one.time) },
      { name: 'title', type: FieldType.string, config: {}, values: found.map((one) => one.title) },
    ],
  };
}

function legendOf(anno: any, labels: Labels): string {
  return legend(labels, { refId: '', expr: anno.name, legendFormat: anno.titleFormat });
}
