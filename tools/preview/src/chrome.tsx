// What stands above the panels: the board's name and its links.
import { css } from '@emotion/css';
import { type GrafanaTheme2 } from '@grafana/data';
import { type SceneComponentProps, SceneObjectBase, type SceneObjectState } from '@grafana/scenes';
import { ToolbarButton, useStyles2 } from '@grafana/ui';

interface TitleState extends SceneObjectState {
  title: string;
}

export class Title extends SceneObjectBase<TitleState> {
  static Component = ({ model }: SceneComponentProps<Title>) => {
    const style = useStyles2((theme: GrafanaTheme2) =>
      css({ ...theme.typography.h4, margin: 0, flexBasis: '100%', lineHeight: 1.4 })
    );
    return <h1 className={style}>{model.useState().title}</h1>;
  };
}

interface LinksState extends SceneObjectState {
  links: any[];
}

export class DashboardLinks extends SceneObjectBase<LinksState> {
  static Component = ({ model }: SceneComponentProps<DashboardLinks>) => (
    <>
      {model.useState().links.map((link, place) => (
        <ToolbarButton
          key={place}
          icon={link.type === 'dashboards' ? 'bars' : 'external-link-alt'}
          variant="canvas"
        >
          {link.title}
        </ToolbarButton>
      ))}
    </>
  );
}
