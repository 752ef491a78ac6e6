// Bundles the preview into dist/, with the icons that @grafana/ui loads by address.
import { build } from 'esbuild';
import { cp, mkdir, rm } from 'node:fs/promises';

await rm('dist', { recursive: true, force: true });
await mkdir('dist/public', { recursive: true });
await build({
  entryPoints: { main: 'src/main.tsx' },
  outdir: 'dist',
  bundle: true,
  format: 'esm',
  splitting: true,
  minify: true,
  jsx: 'automatic',
  alias: {
    '@grafana/plugin-compat/datasources': './src/sources.ts',
    'react-router-dom-v5-compat': 'react-router-dom',
  },
  target: 'chrome120',
  logLevel: 'error',
  logOverride: { 'import-is-undefined': 'silent' },
  define: { 'process.env.NODE_ENV': '"production"', global: 'globalThis' },
  loader: {
    '.svg': 'dataurl',
    '.ttf': 'dataurl',
    '.woff': 'dataurl',
    '.woff2': 'dataurl',
    '.png': 'dataurl',
  },
});
// The fonts of Grafana's pages, under the names by which @grafana/ui asks for them.
for (const [name, weight] of [
  ['Regular', 400],
  ['Medium', 500],
]) {
  const file = `node_modules/@fontsource/inter/files/inter-latin-${weight}-normal.woff2`;
  await cp(file, `dist/public/fonts/inter/Inter-${name}.woff2`);
}
await cp('src/page.html', 'dist/index.html');
await cp('node_modules/@grafana/ui/dist/public', 'dist/public/build/', { recursive: true });
