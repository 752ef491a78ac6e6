// What Grafana says where a query has no answer.
import { css } from '@emotion/css';
import { type FieldConfigSource, type GrafanaTheme2 } from '@grafana/data';
import { useStyles2 } from '@grafana/ui';

export function NoData({ config, children }: { config?: FieldConfigSource; children?: string }) {
  const style = useStyles2((theme: GrafanaTheme2) =>
    css({
      display: 'flex',
      alignItems: 'center',
      justifyContent: 'center',
      width: '100%',
      height: '100%',
      color: theme.colors.text.secondary,
      fontSize: theme.typography.h4.fontSize,
    })
  );
  return <div className={style}>{children ?? config?.defaults.noValue ?? 'No data'}</div>;
}
