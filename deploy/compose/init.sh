# Makes what compose.yaml's services must share and nobody may know; what exists is left alone.
# Runs once, as the services' own user, without network.
set -eu
umask 077

keys=/keys
engine=/secrets/engine
alertmanager=/secrets/alertmanager
scheduler=/secrets/scheduler

if [ ! -e "$engine/engine.key" ]; then
    pair=$(mktemp -d)
    gpuwarden agent keys --out "$pair/made"
    cp "$pair/made/engine.pub" "$keys/engine.pub"
    chmod 0444 "$keys/engine.pub"
    # last: its presence says that the pair is complete
    cp "$pair/made/engine.key" "$engine/engine.key"
    rm -rf "$pair"
fi

token() {
    python -c 'import secrets; print(secrets.token_urlsafe(32), end="")'
}

for name in notify_token operator_token pages_token; do
    [ -e "$engine/$name" ] || token > "$engine/$name"
done
# This stack's Slack and mail server take anything.
printf 'xoxb-simulated' > "$engine/slack_token"

cp "$engine/pages_token" "$scheduler/pages_token"
cp "$engine/notify_token" "$alertmanager/notify_token"
printf 'http://slack:8025/services/simulated' > "$alertmanager/slack_url"
printf 'unused' > "$alertmanager/smtp_password"
# Alertmanager runs as another user (nobody) and alone mounts this volume.
chmod 0444 "$alertmanager"/*
