// State timeline and status history. Grafana's are part of its server (AGPL) and on no registry:
// these are ours, and read the same options and the same field config (values' texts and colours,
// thresholds, units).
import {
  type DisplayValue,
  type Field,
  FieldColorModeId,
  FieldType,
  type PanelProps,
  type TimeRange,
  dateTimeFormat,
  getFieldDisplayName,
} from '@grafana/data';
import { Pagination, VizLegend, measureText, useTheme2 } from '@grafana/ui';
import { LegendDisplayMode } from '@grafana/schema';
import { useState } from 'react';
import { NoData } from './absence';
import { plugin } from '../fields';

interface Span {
  from: number;
  to: number;
  shown: DisplayValue;
}
interface Row {
  name: string;
  spans: Span[];
}

const FONT = 12;
const AXIS = 22;
const PAGER = 34;
const LEGEND = 26;
const TICKS = [1, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440].map((minutes) => minutes * 60_000);

function display(field: Field, value: unknown): DisplayValue {
  return field.display!(value);
}

function rowsOf(props: PanelProps<any>, merged: boolean): Row[] {
  const found: Row[] = [];
  for (const frame of props.data.series) {
    const times = frame.fields.find((field) => field.type === FieldType.time)?.values ?? [];
    const step = times.length > 1 ? Math.min(...gaps(times)) : 60_000;
    for (const field of frame.fields) {
      if (field.type === FieldType.time || field.config.custom?.hideFrom?.viz) {
        continue;
      }
      const spans: Span[] = [];
      let before: unknown = null;
      field.values.forEach((value: unknown, place: number) => {
        const from = times[place];
        const last = spans[spans.length - 1];
        const shown = value === null || value === undefined ? null : display(field, value);
        const same =
          merged &&
          shown &&
          before !== null &&
          last &&
          last.shown.text === shown.text &&
          last.shown.color === shown.color;
        if (same) {
          last.to = from + step;
        } else if (shown) {
          spans.push({ from, to: from + step, shown });
        }
        before = shown;
      });
      found.push({ name: getFieldDisplayName(field, frame, props.data.series), spans });
    }
  }
  return found;
}

function gaps(times: number[]): number[] {
  return times.slice(1).map((time, place) => time - times[place]);
}

function ticks(range: TimeRange, width: number): number[] {
  const from = range.from.valueOf();
  const to = range.to.valueOf();
  const least = (to - from) / Math.max(2, width / 90);
  const step = TICKS.find((one) => one >= least) ?? TICKS[TICKS.length - 1];
  const found: number[] = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    found.push(time);
  }
  return found;
}

function Timeline({ merged, ...props }: PanelProps<any> & { merged: boolean }) {
  const theme = useTheme2();
  const [page, setPage] = useState(1);
  const { options, width, height, timeRange } = props;
  const every = rowsOf(props, merged && options.mergeValues !== false);
  if (!every.some((row) => row.spans.length)) {
    return <NoData config={props.fieldConfig} />;
  }
  const perPage = options.perPage || every.length;
  const pages = Math.ceil(every.length / perPage);
  const rows = every.slice((page - 1) * perPage, page * perPage);
  const legend = options.legend?.showLegend !== false;
  const free = height - AXIS - (pages > 1 ? PAGER : 0) - (legend ? LEGEND : 0);
  const longest = Math.max(...rows.map((row) => measureText(row.name, FONT).width));
  const left = Math.min(width * 0.35, longest + 12);
  const wide = width - left - 8;
  const high = free / rows.length;
  const thick = high * (options.rowHeight ?? 0.9);
  const from = timeRange.from.valueOf();
  const scale = wide / (timeRange.to.valueOf() - from);
  const at = (time: number) => left + Math.min(wide, Math.max(0, (time - from) * scale));
  const custom = props.fieldConfig.defaults.custom ?? {};
  const opacity = (custom.fillOpacity ?? 70) / 100;
  return (
    <div style={{ width, height }}>
      <svg width={width} height={free + AXIS} style={{ display: 'block' }}>
        {ticks(timeRange, wide).map((time) => (
          <g key={time}>
            <line x1={at(time)} x2={at(time)} y1={0} y2={free} stroke={theme.colors.border.weak} />
            <text
              x={at(time)}
              y={free + 15}
              fontSize={FONT}
              textAnchor={at(time) > width - 20 ? 'end' : 'middle'}
              fill={theme.colors.text.primary}
            >
              {dateTimeFormat(time, { format: 'HH:mm', timeZone: props.timeZone })}
            </text>
          </g>
        ))}
        {rows.map((row, place) => (
          <g key={place}>
            <text
              x={left - 8}
              y={high * (place + 0.5)}
              fontSize={Math.min(FONT, high)}
              textAnchor="end"
              dominantBaseline="central"
              fill={theme.colors.text.primary}
            >
              {shortened(row.name, left - 12)}
            </text>
            {row.spans.map((span, number) => {
              const x = at(span.from);
              const size = at(span.to) - x;
              const wanted = merged ? size : size * (options.colWidth ?? 0.9);
              const text = span.shown.text + (span.shown.suffix ?? '');
              const fits =
                options.showValue !== 'never' &&
                thick >= FONT &&
                measureText(text, FONT).width + 6 < wanted;
              return (
                <g key={number}>
                  <rect
                    x={x + (size - wanted) / 2}
                    y={high * place + (high - thick) / 2}
                    width={Math.max(0.5, wanted)}
                    height={thick}
                    fill={span.shown.color}
                    fillOpacity={opacity}
                    stroke={merged && custom.lineWidth !== 0 ? span.shown.color : 'none'}
                  />
                  {fits && (
                    <text
                      x={merged && options.alignValue === 'left' ? x + 4 : x + size / 2}
                      y={high * (place + 0.5)}
                      fontSize={FONT}
                      textAnchor={merged && options.alignValue === 'left' ? 'start' : 'middle'}
                      dominantBaseline="central"
                      fill={theme.colors.getContrastText(
                        theme.visualization.getColorByName(span.shown.color ?? ''),
                        opacity < 0.5 ? undefined : theme.colors.contrastThreshold
                      )}
                    >
                      {text}
                    </text>
                  )}
                </g>
              );
            })}
          </g>
        ))}
      </svg>
      {legend && (
        <VizLegend
          displayMode={LegendDisplayMode.List}
          placement="bottom"
          items={meanings(every, props)}
        />
      )}
      {pages > 1 && (
        <div style={{ display: 'flex', justifyContent: 'center', paddingTop: 4 }}>
          <Pagination
            currentPage={page}
            numberOfPages={pages}
            onNavigate={setPage}
            showSmallVersion={width < 550}
          />
        </div>
      )}
    </div>
  );
}

// What the colours mean: the thresholds where they colour, else every text that is there.
function meanings(rows: Row[], props: PanelProps<any>) {
  const { defaults } = props.fieldConfig;
  const field = props.data.series[0]?.fields.find((one) => one.type !== FieldType.time);
  const items = new Map<string, string>();
  if (field && defaults.color?.mode === FieldColorModeId.Thresholds && !defaults.mappings?.length) {
    const steps = field.config.thresholds?.steps ?? [];
    steps.forEach((step) => {
      const shown = Number.isFinite(step.value) ? display(field, step.value) : undefined;
      const text = shown
        ? `${shown.text}${shown.suffix ?? ''}+`
        : `< ${display(field, steps[1]?.value).text}`;
      items.set(text, step.color);
    });
  } else {
    for (const row of rows) {
      for (const { shown } of row.spans) {
        items.set(`${shown.text}${shown.suffix ?? ''}`, shown.color ?? '');
      }
    }
  }
  return [...items].slice(0, 20).map(([label, color]) => ({ label, color, yAxis: 1 }));
}

function shortened(text: string, width: number): string {
  if (measureText(text, FONT).width <= width) {
    return text;
  }
  let end = text.length;
  while (end > 1 && measureText(`${text.slice(0, end)}…`, FONT).width > width) {
    end -= 1;
  }
  return `${text.slice(0, end)}…`;
}

const custom = {
  fillOpacity: 70,
  lineWidth: 1,
  spanNulls: false,
  insertNulls: false,
  hideFrom: { tooltip: false, viz: false, legend: false },
  axisPlacement: 'auto',
};

export const statetimeline = plugin(
  (props: PanelProps<any>) => <Timeline {...props} merged />,
  custom,
  FieldColorModeId.Thresholds
);
export const statushistory = plugin(
  (props: PanelProps<any>) => <Timeline {...props} merged={false} />,
  custom,
  FieldColorModeId.Thresholds
);
export { ticks };
