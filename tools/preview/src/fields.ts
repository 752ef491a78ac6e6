// Grafana registers what a field may be configured with when it starts; so does the preview, with
// the processors of @grafana/data. Editors are never opened here.
import {
  FieldColorModeId,
  type FieldConfigPropertyItem,
  PanelPlugin,
  type PanelPluginMeta,
  ThresholdsMode,
  booleanOverrideProcessor,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';

const nothing = () => null;

function item(path: string, process: any, defaultValue?: unknown): FieldConfigPropertyItem {
  return {
    id: path,
    path,
    name: path,
    editor: nothing,
    override: nothing,
    process,
    shouldApply: () => true,
    settings: {},
    defaultValue,
  } as unknown as FieldConfigPropertyItem;
}

export function registerFields() {
  const kinds = ['text', 'string', 'number', 'boolean', 'select', 'multi-select', 'radio', 'unit'];
  kinds.push('color', 'fieldColor', 'links', 'mappings', 'thresholds', 'stats-picker', 'strings');
  kinds.push('timezone', 'field-name', 'slider', 'layer-editor', 'dashboard-uid', 'actions');
  standardEditorsRegistry.setInit(() =>
    kinds.map((id) => ({ id, name: id, editor: nothing as any }))
  );
  standardFieldConfigEditorRegistry.setInit(() => [
    item('displayName', displayNameOverrideProcessor),
    item('unit', unitOverrideProcessor),
    item('min', numberOverrideProcessor),
    item('max', numberOverrideProcessor),
    item('decimals', numberOverrideProcessor),
    item('fieldMinMax', booleanOverrideProcessor),
    item('noValue', stringOverrideProcessor),
    item('description', stringOverrideProcessor),
    item('filterable', booleanOverrideProcessor),
    item('links', dataLinksOverrideProcessor),
    item('mappings', valueMappingsOverrideProcessor),
    item('color', identityOverrideProcessor, { mode: FieldColorModeId.Thresholds }),
    item('thresholds', thresholdsOverrideProcessor, {
      mode: ThresholdsMode.Absolute,
      steps: [
        { value: -Infinity, color: 'green' },
        { value: 80, color: 'red' },
      ],
    }),
  ]);
  standardTransformersRegistry.setInit(() => {
    const found = new Map<string, any>();
    for (const one of Object.values(standardTransformers)) {
      const transformation = async () => one;
      found.set(one.id, { id: one.id, name: one.name, transformation, editor: nothing });
    }
    return [...found.values()];
  });
}

// A panel plugin whose fields may be configured by these paths below `custom`.
export function plugin(component: any, custom: Record<string, unknown>, colour: FieldColorModeId) {
  const made = new PanelPlugin(component);
  made.meta = {} as PanelPluginMeta;
  made.setDataSupport({ annotations: true, alertStates: false });
  made.useFieldConfig({
    standardOptions: { color: { defaultValue: { mode: colour } } } as any,
    useCustomConfig: (builder) => {
      for (const [path, defaultValue] of Object.entries(custom)) {
        builder.addCustomEditor({
          id: path,
          path,
          name: path,
          defaultValue,
          editor: nothing as any,
          override: nothing as any,
          process: identityOverrideProcessor,
          shouldApply: () => true,
          settings: {},
        } as any);
      }
    },
  });
  return made;
}
