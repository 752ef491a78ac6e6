// The data sources that there are: in a Grafana its server knows them. Takes the place of
// @grafana/plugin-compat/datasources, which asks the server's part of @grafana/runtime.
import { type DataQueryResponse, LoadingState } from '@grafana/data';
import { RuntimeDataSource } from '@grafana/scenes';
import { type Observable, of } from 'rxjs';
import { Prometheus } from './prometheus';

class Nothing extends RuntimeDataSource {
  query(): Observable<DataQueryResponse> {
    return of({ data: [], state: LoadingState.Done });
  }
}

const made = new Map<string, RuntimeDataSource>();

function source(type: string): RuntimeDataSource {
  let found = made.get(type);
  if (!found) {
    found = type === 'prometheus' ? new Prometheus(type, type) : new Nothing(type, type);
    made.set(type, found);
  }
  return found;
}

// Boards name their source by a variable: of each kind there is one, whatever its name.
export async function getDataSourceInstance(asked: any) {
  return source(asked?.type ?? 'prometheus');
}

export async function getDataSourceInstanceList({ pluginId = 'prometheus' }: any = {}) {
  const name = pluginId[0].toUpperCase() + pluginId.slice(1);
  return [{ ...source(pluginId), name, uid: pluginId, type: pluginId, isDefault: true }];
}

export async function getDefaultDataSourceInstanceListItem() {
  return (await getDataSourceInstanceList())[0];
}

export async function getDataSourceInstanceSettings(asked: any) {
  return (await getDataSourceInstanceList({ pluginId: asked?.type }))[0];
}

export function registerRuntimeDataSourceInstance() {
  throw new Error('the preview has its own data sources');
}
