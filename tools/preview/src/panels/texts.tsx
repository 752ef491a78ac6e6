// Text, and panels that a picture cannot have: they say what would be there.
import { FieldColorModeId, type PanelProps, renderMarkdown } from '@grafana/data';
import { NoData } from './absence';
import { plugin } from '../fields';

function Text(props: PanelProps<any>) {
  const content = props.replaceVariables(props.options.content ?? '');
  const html = props.options.mode === 'html' ? content : renderMarkdown(content);
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

export const text = plugin(Text, {}, FieldColorModeId.Thresholds);
export const logs = plugin(
  () => <NoData>Lines of the job from Loki; no Loki runs behind this preview.</NoData>,
  {},
  FieldColorModeId.Thresholds
);
