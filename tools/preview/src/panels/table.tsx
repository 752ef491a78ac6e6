// Grafana's own table.
import { FieldColorModeId, type PanelProps, cacheFieldDisplayNames } from '@grafana/data';
import { TableCellHeight } from '@grafana/schema';
import { TableNG } from '@grafana/ui/unstable';
import { useMemo } from 'react';
import { NoData } from './absence';
import { plugin } from '../fields';

function Table(props: PanelProps<any>) {
  const { data, options, width, height } = props;
  // Headings are what transformations and overrides call the fields.
  useMemo(() => cacheFieldDisplayNames(data.series), [data.series]);
  const frame = data.series[options.frameIndex ?? 0];
  if (!frame || !frame.fields.length || !frame.length) {
    return <NoData config={props.fieldConfig} />;
  }
  return (
    <TableNG
      data={frame}
      width={width}
      height={height}
      noHeader={options.showHeader === false}
      showTypeIcons={false}
      resizable
      sortBy={options.sortBy}
      cellHeight={options.cellHeight ?? TableCellHeight.Sm}
      enablePagination={options.footer?.enablePagination}
      structureRev={data.structureRev}
      fieldConfig={props.fieldConfig}
      timeRange={props.timeRange}
      enableVirtualization={false}
      getActions={() => []}
      disableSanitizeHtml={false}
    />
  );
}

export const table = plugin(
  Table,
  {
    align: 'auto',
    width: undefined,
    minWidth: undefined,
    displayMode: undefined,
    cellOptions: { type: 'auto' },
    inspect: false,
    filterable: false,
    hidden: undefined,
    hideFrom: undefined,
    wrapText: undefined,
    wrapHeaderText: undefined,
    footer: undefined,
    tooltip: undefined,
  },
  FieldColorModeId.Thresholds
);
