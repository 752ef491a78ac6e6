// Heatmaps of histogram buckets and of calculated ones. Ours, as the timelines are.
import {
  type DataFrame,
  FieldColorModeId,
  FieldType,
  type PanelProps,
  dateTimeFormat,
  getFieldDisplayName,
  getValueFormat,
  formattedValueToString,
} from '@grafana/data';
import { measureText, useTheme2 } from '@grafana/ui';
import { interpolateRgbBasis } from 'd3-interpolate';
import * as scales from 'd3-scale-chromatic';
import { NoData } from './absence';
import { plugin } from '../fields';
import { ticks } from './timelines';

const FONT = 12;
const AXIS = 22;
const SCALE = 24;

function colours(options: any, dark: boolean): (share: number) => string {
  const name = options.color?.scheme ?? 'Oranges';
  const scheme = (scales as any)[`interpolate${name}`] ?? interpolateRgbBasis(['#222', '#f80']);
  // Grafana begins at the colour nearest to the background.
  const reversed = Boolean(options.color?.reverse) !== dark;
  return (share) => scheme(reversed ? 1 - share : share);
}

function Heatmap(props: PanelProps<any>) {
  const theme = useTheme2();
  const { options, width, height, timeRange } = props;
  const rows = props.data.series.flatMap((frame: DataFrame) =>
    frame.fields
      .filter((field) => field.type === FieldType.number)
      .map((field) => ({
        name: getFieldDisplayName(field, frame, props.data.series),
        times: frame.fields.find((one) => one.type === FieldType.time)!.values as number[],
        values: field.values as Array<number | null>,
      }))
  );
  const known = rows.flatMap((row) => row.values).filter((one): one is number => !!one && one > 0);
  if (!known.length) {
    return <NoData config={props.fieldConfig} />;
  }
  const paint = colours(options, theme.isDark);
  const format = getValueFormat(options.yAxis?.unit ?? 'short');
  const named = (text: string) =>
    text === '+Inf'
      ? '+Inf'
      : formattedValueToString(format(Number(text), options.yAxis?.decimals));
  const labels = rows.map((row) => named(row.name));
  const left = Math.max(...labels.map((text) => measureText(text, FONT).width)) + 12;
  const wide = width - left - 8;
  const free = height - AXIS - (options.legend?.show === false ? 0 : SCALE);
  const high = free / rows.length;
  const most = options.color?.max ?? Math.max(...known);
  const from = timeRange.from.valueOf();
  const scale = wide / (timeRange.to.valueOf() - from);
  const at = (time: number) => left + Math.min(wide, Math.max(0, (time - from) * scale));
  const steps = options.color?.exponent ?? 0.5;
  const shade = (value: number) => paint(Math.min(1, (value / most) ** steps));
  return (
    <svg width={width} height={height} style={{ display: 'block' }}>
      {rows.map((row, place) => {
        const top = free - high * (place + 1);
        const step = row.times.length > 1 ? row.times[1] - row.times[0] : 60_000;
        return (
          <g key={place}>
            <text
              x={left - 8}
              y={top + high / 2}
              fontSize={Math.min(FONT, high)}
              textAnchor="end"
              dominantBaseline="central"
              fill={theme.colors.text.primary}
            >
              {labels[place]}
            </text>
            {row.values.map((value, number) =>
              value && value > 0 ? (
                <rect
                  key={number}
                  x={at(row.times[number] - step)}
                  y={top}
                  width={Math.max(0.5, at(row.times[number]) - at(row.times[number] - step))}
                  height={Math.max(1, high - 1)}
                  fill={shade(value)}
                />
              ) : null
            )}
          </g>
        );
      })}
      {ticks(timeRange, wide).map((time) => (
        <text
          key={time}
          x={at(time)}
          y={free + 15}
          fontSize={FONT}
          textAnchor={at(time) > width - 20 ? 'end' : 'middle'}
          fill={theme.colors.text.primary}
        >
          {dateTimeFormat(time, { format: 'HH:mm', timeZone: props.timeZone })}
        </text>
      ))}
      {options.legend?.show !== false && (
        <g transform={`translate(${left}, ${free + AXIS + 6})`}>
          {Array.from({ length: 40 }, (_, place) => (
            <rect
              key={place}
              x={place * 4}
              width={4}
              height={8}
              fill={shade((most * (place + 1)) / 40)}
            />
          ))}
          <text x={166} y={8} fontSize={FONT - 1} fill={theme.colors.text.secondary}>
            {`up to ${Number(most.toPrecision(3))}`}
          </text>
        </g>
      )}
    </svg>
  );
}

export const heatmap = plugin(
  Heatmap,
  { hideFrom: undefined, scaleDistribution: undefined },
  FieldColorModeId.Thresholds
);
