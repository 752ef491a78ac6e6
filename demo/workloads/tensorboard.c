/* A service that everybody uses and that holds GPU memory without computing, like a TensorBoard or
 * a model server that waits: answers every request on a loopback port with one line.
 * Usage: tensorboard PORT */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char answer[] =
    "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n\r\ntensorboard\n";

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s PORT\n", argv[0]);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    int on = 1;
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((unsigned short)atoi(argv[1]));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 16) != 0) {
        perror("tensorboard");
        return 1;
    }
    for (;;) {
        char request[1024];
        int client = accept(listener, NULL, NULL);
        if (client < 0) continue;
        if (read(client, request, sizeof request) > 0 &&
            write(client, answer, sizeof answer - 1) < 0) {
            perror("tensorboard");
        }
        close(client);
    }
}
