// Panels that show values of one moment: stat, gauge, bar gauge. Drawn by @grafana/ui.
import {
  FieldColorModeId,
  type FieldDisplay,
  type PanelProps,
  VizOrientation,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
} from '@grafana/data';
import { BarGaugeDisplayMode, BarGaugeValueMode } from '@grafana/schema';
import {
  BarGauge,
  BigValue,
  BigValueColorMode,
  BigValueGraphMode,
  BigValueTextMode,
  VizRepeater,
  useTheme2,
} from '@grafana/ui';
import { NoData } from './absence';
import { plugin } from '../fields';

function useValues(props: PanelProps<any>, sparkline: boolean): FieldDisplay[] {
  const theme = useTheme2();
  return getFieldDisplayValues({
    fieldConfig: props.fieldConfig,
    reduceOptions: { calcs: ['lastNotNull'], ...props.options.reduceOptions },
    replaceVariables: props.replaceVariables,
    theme,
    data: props.data.series,
    sparkline,
    timeZone: props.timeZone,
  }).filter((one) => one.field !== undefined);
}

function Stat(props: PanelProps<any>) {
  const { options, width, height } = props;
  const theme = useTheme2();
  const graph = options.graphMode ?? BigValueGraphMode.Area;
  const values = useValues(props, graph !== BigValueGraphMode.None);
  if (!props.data.series.length) {
    return <NoData config={props.fieldConfig} />;
  }
  return (
    <VizRepeater
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width: wide, height: high, alignmentFactors, count }) => (
        <BigValue
          value={value.display}
          count={count}
          sparkline={value.sparkline}
          colorMode={options.colorMode ?? BigValueColorMode.Value}
          graphMode={graph}
          justifyMode={options.justifyMode}
          textMode={options.textMode ?? BigValueTextMode.Auto}
          alignmentFactors={alignmentFactors}
          text={options.text}
          width={wide}
          height={high}
          theme={theme}
        />
      )}
      width={width}
      height={height}
      source={props.data}
      itemSpacing={3}
      renderCounter={props.renderCounter}
      autoGrid
      orientation={options.orientation ?? VizOrientation.Auto}
    />
  );
}

function Bars(props: PanelProps<any>) {
  const { options, width, height } = props;
  const theme = useTheme2();
  const values = useValues(props, false);
  if (!props.data.series.length) {
    return <NoData config={props.fieldConfig} />;
  }
  const orientation = options.orientation ?? VizOrientation.Auto;
  const along = orientation === VizOrientation.Auto ? across(width, height) : orientation;
  return (
    <VizRepeater
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width: wide, height: high, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          width={wide}
          height={high}
          orientation={along}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
          theme={theme}
          itemSpacing={8}
          lcdCellWidth={8}
          text={options.text}
          displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient}
          valueDisplayMode={options.valueMode ?? BarGaugeValueMode.Color}
          namePlacement={options.namePlacement}
          showUnfilled={options.showUnfilled ?? true}
          alignmentFactors={alignmentFactors}
        />
      )}
      width={width}
      height={height}
      source={props.data}
      itemSpacing={8}
      minVizWidth={options.minVizWidth ?? 8}
      minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={options.maxVizHeight ?? 300}
      renderCounter={props.renderCounter}
      orientation={along}
    />
  );
}

function across(width: number, height: number) {
  return width > height ? VizOrientation.Vertical : VizOrientation.Horizontal;
}

// @grafana/ui exports no gauge: an arc of our own over the same display values.
function Gauge(props: PanelProps<any>) {
  const theme = useTheme2();
  const values = useValues(props, false);
  if (!props.data.series.length) {
    return <NoData config={props.fieldConfig} />;
  }
  return (
    <VizRepeater
      getValues={() => values}
      renderValue={({ value, width, height }) => {
        const size = Math.min(width, height * 1.4);
        const min = value.field.min ?? 0;
        const max = value.field.max ?? 100;
        const raw = Number(value.display.numeric);
        const share = Math.min(1, Math.max(0, (raw - min) / (max - min || 1)));
        const arc = (part: number, colour: string, thick: number) => (
          <path
            d={`M 12 62 A 44 44 0 0 1 88 62`}
            pathLength={100}
            fill="none"
            stroke={colour}
            strokeWidth={thick}
            strokeDasharray={`${part * 100} 200`}
          />
        );
        return (
          <svg width={width} height={height} viewBox="0 0 100 80" style={{ maxWidth: size * 1.2 }}>
            {arc(1, theme.colors.background.secondary, 12)}
            {arc(share, value.display.color ?? theme.colors.primary.main, 12)}
            <text
              x={50}
              y={60}
              textAnchor="middle"
              fontSize={16}
              fill={value.display.color ?? theme.colors.text.primary}
            >
              {`${value.display.prefix ?? ''}${value.display.text}${value.display.suffix ?? ''}`}
            </text>
            <text x={50} y={76} textAnchor="middle" fontSize={7} fill={theme.colors.text.primary}>
              {values.length > 1 ? value.display.title : ''}
            </text>
          </svg>
        );
      }}
      width={props.width}
      height={props.height}
      source={props.data}
      renderCounter={props.renderCounter}
      autoGrid
      orientation={VizOrientation.Auto}
    />
  );
}

export const stat = plugin(Stat, {}, FieldColorModeId.Thresholds);
export const gauge = plugin(Gauge, {}, FieldColorModeId.Thresholds);
export const bargauge = plugin(Bars, {}, FieldColorModeId.Thresholds);
