// Time series by @grafana/ui's own plots, with the board's annotations over them.
import { type DataFrame, FieldColorModeId, FieldType, type PanelProps } from '@grafana/data';
import { TimeSeries, type UPlotConfigBuilder, useTheme2 } from '@grafana/ui';
import { useLayoutEffect, useRef } from 'react';
import { NoData } from './absence';
import { plugin } from '../fields';

function Graph(props: PanelProps<any>) {
  const { data, options, width, height } = props;
  const frames = data.series.filter((frame) =>
    frame.fields.some((field) => field.type === FieldType.number)
  );
  if (!frames.length) {
    return <NoData config={props.fieldConfig} />;
  }
  return (
    <TimeSeries
      frames={frames}
      structureRev={data.structureRev}
      timeRange={props.timeRange}
      timeZone={props.timeZone}
      width={width}
      height={height}
      legend={options.legend}
      options={options}
    >
      {(config: UPlotConfigBuilder) => (
        <Annotations config={config} frames={data.annotations ?? []} />
      )}
    </TimeSeries>
  );
}

// A dashed line at each event, and a mark below it, in the colour of its query.
function Annotations({ config, frames }: { config: UPlotConfigBuilder; frames: DataFrame[] }) {
  const theme = useTheme2();
  const shown = useRef(frames);
  shown.current = frames;
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const context = plot.ctx;
      const { left, top, width, height } = plot.bbox;
      context.save();
      for (const frame of shown.current) {
        const times = frame.fields.find((field) => field.name === 'time')?.values ?? [];
        const colours = frame.fields.find((field) => field.name === 'color')?.values ?? [];
        times.forEach((time: number, place: number) => {
          const x = plot.valToPos(time, 'x', true);
          if (x < left || x > left + width) {
            return;
          }
          context.strokeStyle = theme.visualization.getColorByName(colours[place] ?? 'red');
          context.fillStyle = context.strokeStyle;
          context.lineWidth = devicePixelRatio;
          context.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
          context.beginPath();
          context.moveTo(x, top);
          context.lineTo(x, top + height);
          context.stroke();
          context.setLineDash([]);
          const size = 5 * devicePixelRatio;
          context.beginPath();
          context.moveTo(x, top + height);
          context.lineTo(x - size, top + height + size * 1.2);
          context.lineTo(x + size, top + height + size * 1.2);
          context.fill();
        });
      }
      context.restore();
    });
  }, [config, theme]);
  return null;
}

export const timeseries = plugin(
  Graph,
  {
    drawStyle: 'line',
    lineInterpolation: 'linear',
    lineWidth: 1,
    lineStyle: undefined,
    lineColor: undefined,
    fillColor: undefined,
    fillOpacity: 0,
    fillBelowTo: undefined,
    gradientMode: 'none',
    barAlignment: 0,
    barMaxWidth: undefined,
    barWidthFactor: undefined,
    showPoints: 'auto',
    pointSize: 5,
    pointColor: undefined,
    spanNulls: false,
    insertNulls: false,
    stacking: { mode: 'none', group: 'A' },
    axisPlacement: 'auto',
    axisLabel: undefined,
    axisWidth: undefined,
    axisSoftMin: undefined,
    axisSoftMax: undefined,
    axisGridShow: undefined,
    axisColorMode: undefined,
    axisCenteredZero: undefined,
    axisBorderShow: undefined,
    scaleDistribution: { type: 'linear' },
    transform: undefined,
    hideFrom: { tooltip: false, viz: false, legend: false },
    thresholdsStyle: { mode: 'off' },
  },
  FieldColorModeId.PaletteClassic
);
