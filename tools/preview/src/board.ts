// A board of the classic schema as a scene: the same panels, variables, annotations and links.
import {
  ConstantVariable,
  CustomVariable,
  DataSourceVariable,
  EmbeddedScene,
  IntervalVariable,
  LocalValueVariable,
  MultiValueVariable,
  QueryVariable,
  SceneControlsSpacer,
  SceneDataLayerSet,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneRefreshPicker,
  SceneTimePicker,
  SceneTimeRange,
  SceneVariableSet,
  TextBoxVariable,
  VariableValueSelectors,
  VizPanel,
  dataLayers,
} from '@grafana/scenes';
import { DashboardLinks, Title } from './chrome';

export interface Shown {
  from: string;
  to: string;
  values: Record<string, string[]>;
  open: boolean; // collapsed rows, opened
}

// The body comes once variables have their values: panels may be repeated for each.
export async function scene(board: any, shown: Shown): Promise<EmbeddedScene> {
  const set = new SceneVariableSet({
    variables: board.templating.list.map((one: any) => variable(one, shown.values[one.name])),
  });
  const made = new EmbeddedScene({
    $timeRange: new SceneTimeRange({ from: shown.from, to: shown.to, timeZone: 'utc' }),
    $variables: set,
    $data: new SceneDataLayerSet({ layers: annotations(board) }),
    controls: [
      new Title({ title: board.title }),
      new VariableValueSelectors({}),
      new SceneControlsSpacer(),
      new DashboardLinks({ links: board.links ?? [] }),
      new SceneTimePicker({ isOnCanvas: true }),
      new SceneRefreshPicker({ refresh: board.refresh, isOnCanvas: true }),
    ],
    body: new SceneGridLayout({ children: [] }),
  });
  const deactivate = made.activate();
  while (set.state.variables.some((one) => set.isVariableLoadingOrWaitingToUpdate(one))) {
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  const panels = repeated(board.panels, set);
  deactivate();
  made.setState({ body: new SceneGridLayout({ isLazy: false, children: rows(panels, shown) }) });
  return made;
}

// Panels with `repeat`, once for each value of the variable, side by side in rows; what is below
// moves down as in Grafana.
function repeated(panels: any[], set: SceneVariableSet): any[] {
  const found: any[] = [];
  let shift = 0;
  for (const panel of panels) {
    const at = { ...panel.gridPos, y: panel.gridPos.y + shift };
    if (panel.type === 'row' && panel.panels?.length) {
      found.push({ ...panel, gridPos: at, panels: repeated(panel.panels, set) });
      continue;
    }
    const chosen = panel.repeat ? set.getByName(panel.repeat) : undefined;
    if (!(chosen instanceof MultiValueVariable)) {
      found.push({ ...panel, gridPos: at });
      continue;
    }
    const { hasAllValue, options } = { hasAllValue: chosen.hasAllValue(), ...chosen.state };
    const values = hasAllValue ? options.map((one) => one.value) : [chosen.getValue()].flat();
    const across =
      panel.repeatDirection === 'v' ? 1 : Math.min(values.length, panel.maxPerRow ?? 4);
    const width = panel.repeatDirection === 'v' ? at.w : 24 / Math.max(1, across);
    values.forEach((value, place) => {
      const gridPos = {
        x: panel.repeatDirection === 'v' ? at.x : (place % across) * width,
        y: at.y + Math.floor(place / across) * at.h,
        w: width,
        h: at.h,
      };
      const own = { name: panel.repeat, value: `${value}` };
      found.push({ ...panel, id: `${panel.id}-${place}`, gridPos, own });
    });
    shift += (Math.ceil(values.length / across) - 1) * at.h;
  }
  return found;
}

function variable(one: any, chosen?: string[]) {
  const common = {
    name: one.name,
    label: one.label || one.name,
    description: one.description,
    hide: typeof one.hide === 'string' ? undefined : one.hide,
  };
  const value = chosen ?? one.current?.value;
  switch (one.type) {
    case 'datasource':
      return new DataSourceVariable({ ...common, pluginId: one.query });
    case 'constant':
      return new ConstantVariable({ ...common, value: chosen?.[0] ?? one.query, hide: 2 });
    case 'textbox':
      return new TextBoxVariable({ ...common, value: chosen?.[0] ?? one.query ?? '' });
    case 'interval':
      return new IntervalVariable({
        ...common,
        intervals: one.query.split(','),
        value: value ?? '',
      });
    case 'custom':
      return new CustomVariable({
        ...common,
        query: one.query,
        isMulti: one.multi,
        includeAll: one.includeAll,
        allValue: one.allValue,
        ...(value === undefined
          ? {}
          : { value: one.multi ? value : [value].flat()[0], text: value }),
      });
    case 'query': {
      const all = one.includeAll && chosen === undefined;
      return new QueryVariable({
        ...common,
        datasource: one.datasource,
        query: one.query,
        regex: one.regex ?? '',
        refresh: one.refresh,
        sort: one.sort,
        isMulti: one.multi,
        includeAll: one.includeAll,
        allValue: one.allValue,
        ...(all ? { value: '$__all', text: 'All' } : {}),
        ...(chosen
          ? { value: one.multi ? chosen : chosen[0], text: one.multi ? chosen : chosen[0] }
          : {}),
      });
    }
    default:
      throw new Error(`the preview knows no variable of type ${one.type}`);
  }
}

function annotations(board: any) {
  return (board.annotations?.list ?? [])
    .filter((one: any) => one.expr || one.target)
    .map(
      (one: any) =>
        new dataLayers.AnnotationsDataLayer({
          name: one.name,
          query: one,
          isEnabled: one.enable,
          isHidden: true,
        })
    );
}

// Panels after a row's heading belong to it; a collapsed row carries its own.
function rows(panels: any[], shown: Shown) {
  const found: Array<SceneGridItem | SceneGridRow> = [];
  let shift = 0; // how far opened rows push down what follows
  for (const panel of panels) {
    if (panel.type !== 'row') {
      found.push(item(panel, shift));
      continue;
    }
    const inside = panel.panels ?? [];
    const top = panel.gridPos.y + shift;
    const lowest = Math.min(...inside.map((one: any) => one.gridPos.y), Infinity);
    const closed = panel.collapsed && !shown.open;
    const children = inside.map((one: any) => item(one, top + 1 - lowest));
    found.push(
      new SceneGridRow({
        key: `row-${panel.id}`,
        title: panel.title,
        isCollapsed: closed,
        isCollapsible: true,
        x: 0,
        y: top,
        width: 24,
        height: 1,
        children,
      })
    );
    if (panel.collapsed && shown.open && inside.length) {
      const bottom = Math.max(...inside.map((one: any) => one.gridPos.y + one.gridPos.h));
      shift += bottom - lowest;
    }
  }
  return found;
}

function item(panel: any, shift: number): SceneGridItem {
  const { x, y, w, h } = panel.gridPos;
  return new SceneGridItem({
    key: `item-${panel.id}`,
    x,
    y: y + shift,
    width: w,
    height: h,
    isResizable: false,
    isDraggable: false,
    body: new VizPanel({
      key: `panel-${panel.id}`,
      $variables: panel.own && new SceneVariableSet({ variables: [own(panel.own)] }),
      title: panel.title ?? '',
      description: panel.description,
      pluginId: panel.type,
      options: panel.options ?? {},
      fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] },
      displayMode: panel.transparent ? 'transparent' : 'default',
      $data: data(panel),
    }),
  });
}

function own({ name, value }: { name: string; value: string }) {
  return new LocalValueVariable({ name, value, text: value });
}

function data(panel: any) {
  const targets = panel.targets ?? [];
  if (!targets.length) {
    return undefined;
  }
  const runner = new SceneQueryRunner({
    datasource: panel.datasource ?? targets[0].datasource,
    queries: targets,
    maxDataPoints: panel.maxDataPoints ?? undefined,
    minInterval: panel.interval,
  });
  return new SceneDataTransformer({ $data: runner, transformations: panel.transformations ?? [] });
}
